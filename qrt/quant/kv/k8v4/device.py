"""k8v4 KV on the device: scores of int8, V of int4; only the layout is its own."""

import triton
import triton.language as tl

from qrt.quant.kv.device import KVDevice, load_words, scale_of, store_scale, store_words, stored_scale
from qrt.quant.kv.int4.device import DEVICE as INT4
from qrt.quant.kv.int4.device import _best_scale, _values, bytes_of
from qrt.quant.kv.int8.device import DEVICE as INT8
from qrt.quant.kv.int8.device import _exact, codes_of


@triton.jit
def _load(
    buffers, slots, live, head,
    HEADS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    return load_words(buffers, slots, live, head, HEADS, D // 2, 2, H, D // 4, H // 2, TOGETHER)


@triton.jit
def _decode(tile):
    k_lo, k_hi = _exact(tile[0])
    v_lo, v_hi = _values(tl.trans(tile[1]), scale_of(tile[2], 2), scale_of(tile[2], 3))
    return k_lo * scale_of(tile[2], 0), k_hi * scale_of(tile[2], 1), v_lo, v_hi


@triton.jit
def _encode_k(lo, hi, buffers, slots, heads, live, HEADS: tl.constexpr, D: tl.constexpr):
    scale_lo = stored_scale(tl.max(tl.abs(lo), 1), 127.0)
    scale_hi = stored_scale(tl.max(tl.abs(hi), 1), 127.0)
    words = codes_of(lo, scale_lo) + (codes_of(hi, scale_hi) << 8)
    store_words(words, buffers[0], slots, heads, live, HEADS, D // 2, 2)
    store_scale(scale_lo, buffers, slots, heads, live, HEADS, 0)
    store_scale(scale_hi, buffers, slots, heads, live, HEADS, 1)


@triton.jit
def _encode_v(lo, hi, buffers, slots, heads, live, HEADS: tl.constexpr, D: tl.constexpr):
    scale_lo, scale_hi = _best_scale(lo, D), _best_scale(hi, D)
    words = bytes_of(lo, scale_lo) + (bytes_of(hi, scale_hi) << 8)
    store_words(words, buffers[1], slots, heads, live, HEADS, D // 4, 1)
    store_scale(scale_lo, buffers, slots, heads, live, HEADS, 2)
    store_scale(scale_hi, buffers, slots, heads, live, HEADS, 3)


@triton.jit
def _encode(
    lo, hi, buffers, slots, heads, live, which, HEADS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    if which == 0:
        _encode_k(lo, hi, buffers, slots, heads, live, HEADS, D)
    else:
        _encode_v(lo, hi, buffers, slots, heads, live, HEADS, D)


DEVICE = KVDevice(
    parts=2,
    encode=_encode,
    load=_load,
    decode=_decode,
    query=INT8.query,
    scores=INT8.scores,
    weight=INT4.weight,
    empty=INT4.empty,
    accumulate=INT4.accumulate,
    finish=INT4.finish,
)
