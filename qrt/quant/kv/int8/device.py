"""int8 KV on the device: one shuffle of bytes per two values, fp16 dots on the codes.

K keeps its bias (1024 + u, an fp16 whose low byte is u), which is corrected per query row. V becomes exactly
u - 128, because a bias would drown the signal of long contexts (docs/kv-layout.md#on-the-device).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qrt.quant.kv.device import (
    ASM,
    KVDevice,
    apart,
    floor_plus,
    load_words,
    per_row,
    scale_of,
    steps_of,
    store_scale,
    store_words,
    stored_scale,
    sums_of,
    together,
    words_weight,
)
from qrt.quant.kv.many.device import largest

K_BIAS = tl.constexpr(1024.0 + 128.0)


@triton.jit
def _biased(words):
    """Return 1024 + u, fp16, of the low and of the high byte of words [N, H]."""
    if ASM:
        return tl.inline_asm_elementwise(
            """prmt.b32 $0, $2, 0x64646464, 0x4240;
            prmt.b32 $1, $2, 0x64646464, 0x4341;""",
            "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        words = words.to(tl.int32)
        return (words & 0xFF).to(tl.float16) + 1024.0, (words >> 8 & 0xFF).to(tl.float16) + 1024.0


@triton.jit
def _exact(words):
    """Words [N, H] -> u - 128 of the low and of the high byte, fp16."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bias;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, $2, 0x64646464, 0x4240;
            prmt.b32 $1, $2, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, bias;
            sub.f16x2 $1, $1, bias;
            }""",
            "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        words = words.to(tl.int32)
        return (words & 0xFF).to(tl.float16) - 128.0, (words >> 8 & 0xFF).to(tl.float16) - 128.0


@triton.jit
def _load(
    buffers, slots, live, head,
    HEADS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    return load_words(buffers, slots, live, head, HEADS, D // 2, 1, H, D // 2, H, TOGETHER)


@triton.jit
def _decode(tile):
    k_lo, k_hi = _exact(tile[0])
    v_lo, v_hi = _exact(tl.trans(tile[1]))
    k_lo, k_hi = k_lo * scale_of(tile[2], 0), k_hi * scale_of(tile[2], 1)
    return k_lo, k_hi, v_lo * scale_of(tile[2], 2), v_hi * scale_of(tile[2], 3)


@triton.jit
def _query(lo, hi, scale, N: tl.constexpr, TOGETHER: tl.constexpr):
    lo, hi = (lo.to(tl.float32) * scale).to(tl.float16), (hi.to(tl.float32) * scale).to(tl.float16)
    lo, hi = tl.trans(apart(lo, TOGETHER)), tl.trans(apart(hi, TOGETHER))
    return lo, hi, sums_of(lo, N) * -K_BIAS, sums_of(hi, N) * -K_BIAS


@triton.jit
def _scores(query, tile):
    q_lo, q_hi, less_lo, less_hi = query
    k_lo, k_hi = _biased(tile[0])
    M: tl.constexpr = q_lo.shape[1]
    shape: tl.constexpr = (k_lo.shape[0], M)
    lo = tl.dot(k_lo, q_lo, tl.broadcast_to(less_lo, shape))  # what a bias costs, from the start
    hi = tl.dot(k_hi, q_hi, tl.broadcast_to(less_hi, shape))
    return lo * per_row(scale_of(tile[2], 0), M) + hi * per_row(scale_of(tile[2], 1), M)


@triton.jit
def _weight(tile, M: tl.constexpr):
    return per_row(words_weight(tile[2]), M)


@triton.jit
def _empty(M: tl.constexpr, H: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr):
    half = tl.zeros([TOGETHER * H, M], tl.float32)
    return half, half


@triton.jit
def _accumulate(acc, p, alpha, tile):
    M: tl.constexpr = p.shape[1]
    p_lo, p_hi = p * per_row(scale_of(tile[2], 2), M), p * per_row(scale_of(tile[2], 3), M)
    v_lo, v_hi = _exact(tile[1])
    lo = tl.dot(v_lo, p_lo.to(tl.float16), acc[0] * alpha[None, :])
    hi = tl.dot(v_hi, p_hi.to(tl.float16), acc[1] * alpha[None, :])
    return lo, hi


@triton.jit
def _finish(acc, TOGETHER: tl.constexpr):
    return together(tl.trans(acc[0]), TOGETHER), together(tl.trans(acc[1]), TOGETHER)


@triton.jit
def codes_of(half, scale):
    """Return the code of each value in the low 16 bits of an int32."""
    return floor_plus(tl.minimum(tl.maximum(steps_of(half, scale) + 128.5, 0.0), 255.0), 0)


@triton.jit
def _encode(
    lo, hi, buffers, slots, heads, live, which, HEADS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    scale_lo = stored_scale(tl.max(tl.abs(lo), 1), 127.0)
    scale_hi = stored_scale(tl.max(tl.abs(hi), 1), 127.0)
    words = codes_of(lo, scale_lo) + (codes_of(hi, scale_hi) << 8)
    buffer = tl.where(which == 0, buffers[0], buffers[1])
    store_words(words, buffer, slots, heads, live, HEADS, D // 2, 1)
    store_scale(scale_lo, buffers, slots, heads, live, HEADS, 2 * which)
    store_scale(scale_hi, buffers, slots, heads, live, HEADS, 2 * which + 1)


@gluon.jit
def encode_many(lo, hi, LANES: gl.constexpr, ROWS: gl.constexpr):
    """Encode half vectors: their words and scales, as `qrt.quant.kv.many.device` says."""
    scale_lo = stored_scale(largest(lo, LANES), 127.0)
    scale_hi = stored_scale(largest(hi, LANES), 127.0)
    return codes_of(lo, scale_lo) + (codes_of(hi, scale_hi) << 8), scale_lo, scale_hi


DEVICE = KVDevice(
    parts=1,
    encode=_encode,
    load=_load,
    decode=_decode,
    query=_query,
    scores=_scores,
    weight=_weight,
    empty=_empty,
    accumulate=_accumulate,
    finish=_finish,
)
