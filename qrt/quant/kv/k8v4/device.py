"""k8v4 KV on the device: scores as int8's, V as int4's; only where things lie is its own."""

import triton
import triton.language as tl

from qrt.quant.kv.device import KVDevice, load_scales, part_columns, scale_of, store_scale, stored_scale
from qrt.quant.kv.int4.device import DEVICE as INT4
from qrt.quant.kv.int4.device import _best_scale, _byte, _values
from qrt.quant.kv.int8.device import DEVICE as INT8
from qrt.quant.kv.int8.device import _codes, _exact


@triton.jit
def _load(buffers, slots, live, head, HEADS: tl.constexpr, D: tl.constexpr, H: tl.constexpr):
    """K words [N, H], V words [H/2, N], and the four scales of each token."""
    W: tl.constexpr = D // 2 + D // 4
    dims, real = part_columns(D, 2, H)
    column = tl.arange(0, H // 2)
    token = buffers[0] + (slots * (HEADS * W) + head * W)
    k_mask, v_mask = live[:, None], live[None, :]
    if D // 2 != H:
        k_mask, v_mask = k_mask & real[None, :], v_mask & (column < D // 4)[:, None]
    k = tl.load(token[:, None] + dims[None, :], mask=k_mask, other=0)
    v = tl.load(token[None, :] + (D // 2 + column)[:, None], mask=v_mask, other=0)
    return k, v, load_scales(buffers, slots, live, head, HEADS)


@triton.jit
def _decode(tile):
    k_lo, k_hi = _exact(tile[0])
    v_lo, v_hi = _values(tl.trans(tile[1]), scale_of(tile[2], 2), scale_of(tile[2], 3))
    return k_lo * scale_of(tile[2], 0)[:, None], k_hi * scale_of(tile[2], 1)[:, None], v_lo, v_hi


@triton.jit
def _encode_k(lo, hi, buffers, token, slots, heads, live, HEADS: tl.constexpr, D: tl.constexpr):
    dims, real = part_columns(D, 2, lo.shape[1])
    scale_lo, scale_hi = (
        stored_scale(tl.max(tl.abs(lo), 1), 127.0),
        stored_scale(tl.max(tl.abs(hi), 1), 127.0),
    )
    words = _codes(lo, scale_lo) + (_codes(hi, scale_hi) << 8)
    tl.store(token[:, None] + dims[None, :], words.to(tl.int16), mask=live[:, None] & real[None, :])
    store_scale(scale_lo, buffers, slots, heads, live, HEADS, 0)
    store_scale(scale_hi, buffers, slots, heads, live, HEADS, 1)


@triton.jit
def _encode_v(lo, hi, buffers, token, slots, heads, live, HEADS: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, lo.shape[1] // 2)
    scale_lo, scale_hi = _best_scale(lo, D), _best_scale(hi, D)
    words = _byte(lo, scale_lo) + (_byte(hi, scale_hi) << 8)
    mask = live[:, None] & (column < D // 4)[None, :]
    tl.store(token[:, None] + (D // 2 + column)[None, :], words.to(tl.int16), mask=mask)
    store_scale(scale_lo, buffers, slots, heads, live, HEADS, 2)
    store_scale(scale_hi, buffers, slots, heads, live, HEADS, 3)


@triton.jit
def _encode(
    lo, hi, buffers, slots, heads, live, which, HEADS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    W: tl.constexpr = D // 2 + D // 4
    token = buffers[0] + (slots * (HEADS * W) + heads * W)
    if which == 0:
        _encode_k(lo, hi, buffers, token, slots, heads, live, HEADS, D)
    else:
        _encode_v(lo, hi, buffers, token, slots, heads, live, HEADS, D)


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
