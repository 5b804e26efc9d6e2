"""int4 KV on the device: one lop3 per two values, fp16 dots on the codes.

A word's four nibbles become fp16 when the exponent bits above them are set: 1024 + n for the low nibble of a
byte, 1024 + 16n for the high one; q and the accumulator absorb the factor 16. K keeps its bias, which is
corrected per query row. V becomes exactly n - 8; the missing half step of the mid-rise grid (n - 7.5) is
added from the sum of the scaled probabilities, in fp32 (docs/kv-layout.md#on-the-device).
"""

import triton
import triton.language as tl

from qrt.quant.kv.device import (
    ASM,
    KVDevice,
    all_tokens,
    apart,
    floor_above,
    floor_plus,
    load_words,
    no_sums,
    part_columns,
    per_row,
    scale_of,
    steps_of,
    store_scale,
    store_words,
    stored_scale,
    sums_of,
    together,
    with_tokens,
    words_weight,
)

LOW_BIAS = tl.constexpr(1024.0 + 7.5)  # bias of 1024 + n
HIGH_BIAS = tl.constexpr(1024.0 + 16 * 7.5)  # bias of 1024 + 16 n


@triton.jit
def _biased(words):
    """Return 1024 + n, 1024 + 16n, 1024 + n, 1024 + 16n, fp16, of the four nibbles of words [N, P]."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 upper;
            shr.b32 upper, $4, 8;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 $2, upper, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $3, upper, 0x00f000f0, 0x64006400, 0xea;
            }""",
            "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b, c, d = _nibbles(words)
        return a + 1024.0, b * 16.0 + 1024.0, c + 1024.0, d * 16.0 + 1024.0


@triton.jit
def _exact(words):
    """Return n - 8, 16 (n - 8), n - 8, 16 (n - 8), fp16, of the four nibbles of words [N, P]."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 upper, low, high;
            mov.b32 low, 0x64086408;
            mov.b32 high, 0x64806480;
            shr.b32 upper, $4, 8;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 $2, upper, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $3, upper, 0x00f000f0, 0x64006400, 0xea;
            sub.f16x2 $0, $0, low;
            sub.f16x2 $1, $1, high;
            sub.f16x2 $2, $2, low;
            sub.f16x2 $3, $3, high;
            }""",
            "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b, c, d = _nibbles(words)
        return a - 8.0, (b - 8.0) * 16.0, c - 8.0, (d - 8.0) * 16.0


@triton.jit
def _nibbles(words):
    words = words.to(tl.int32)
    low, high = (words & 15).to(tl.float16), (words >> 4 & 15).to(tl.float16)
    return low, high, (words >> 8 & 15).to(tl.float16), (words >> 12 & 15).to(tl.float16)


@triton.jit
def _load(
    buffers, slots, live, head,
    HEADS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    return load_words(buffers, slots, live, head, HEADS, D // 4, 1, H // 2, D // 4, H // 2, TOGETHER)


@triton.jit
def parts_of(half):
    """Split [M, H] into its two parts [M, H/2]."""
    return tl.split(tl.permute(tl.reshape(half, (half.shape[0], 2, half.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _half(a, b):
    """Undo `parts_of`."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _values(words, scale_lo, scale_hi):
    """Decode words [N, P] with the scales [N, 1] of their half heads: lo, hi [N, 2P] fp32."""
    a, b, c, d = _exact(words)
    lo = _half(a.to(tl.float32), b.to(tl.float32) * 0.0625) + 0.5
    hi = _half(c.to(tl.float32), d.to(tl.float32) * 0.0625) + 0.5
    return lo * scale_lo, hi * scale_hi


@triton.jit
def _decode(tile):
    k_lo, k_hi = _values(tile[0], scale_of(tile[2], 0), scale_of(tile[2], 1))
    v_lo, v_hi = _values(tl.trans(tile[1]), scale_of(tile[2], 2), scale_of(tile[2], 3))
    return k_lo, k_hi, v_lo, v_hi


@triton.jit
def _half_query(half, scale, N: tl.constexpr, TOGETHER: tl.constexpr):
    a, b = parts_of(half.to(tl.float32) * scale)
    a, b = a.to(tl.float16), (b * 0.0625).to(tl.float16)
    a, b = tl.trans(apart(a, TOGETHER)), tl.trans(apart(b, TOGETHER))
    return a, b, sums_of(a, N) * -LOW_BIAS - sums_of(b, N) * HIGH_BIAS


@triton.jit
def _query(lo, hi, scale, N: tl.constexpr, TOGETHER: tl.constexpr):
    return _half_query(lo, scale, N, TOGETHER) + _half_query(hi, scale, N, TOGETHER)


@triton.jit
def _scores(query, tile):
    q_a, q_b, less_lo, q_c, q_d, less_hi = query
    k_a, k_b, k_c, k_d = _biased(tile[0])
    M: tl.constexpr = q_a.shape[1]
    shape: tl.constexpr = (k_a.shape[0], M)
    lo = tl.dot(k_a, q_a, tl.broadcast_to(less_lo, shape))  # begins with the correction of the bias
    hi = tl.dot(k_c, q_c, tl.broadcast_to(less_hi, shape))
    lo, hi = tl.dot(k_b, q_b, lo), tl.dot(k_d, q_d, hi)
    return lo * per_row(scale_of(tile[2], 0), M) + hi * per_row(scale_of(tile[2], 1), M)


@triton.jit
def _weight(tile, M: tl.constexpr):
    return per_row(words_weight(tile[2]), M)


@triton.jit
def _empty(M: tl.constexpr, H: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr):
    part = tl.zeros([TOGETHER * H // 2, M], tl.float32)
    mass = no_sums(M, N)
    return part, part, part, part, mass, mass


@triton.jit
def _accumulate(acc, p, alpha, tile):
    a, b, c, d, mass_lo, mass_hi = acc
    M: tl.constexpr = p.shape[1]
    p_lo, p_hi = p * per_row(scale_of(tile[2], 2), M), p * per_row(scale_of(tile[2], 3), M)
    mass_lo, mass_hi = with_tokens(mass_lo, alpha, p_lo), with_tokens(mass_hi, alpha, p_hi)
    alpha = alpha[None, :]
    p_lo, p_hi = p_lo.to(tl.float16), p_hi.to(tl.float16)
    v_a, v_b, v_c, v_d = _exact(tile[1])
    a, b = tl.dot(v_a, p_lo, a * alpha), tl.dot(v_b, p_lo, b * alpha)
    c, d = tl.dot(v_c, p_hi, c * alpha), tl.dot(v_d, p_hi, d * alpha)
    return a, b, c, d, mass_lo, mass_hi


@triton.jit
def _half_sum(a, b, mass, TOGETHER: tl.constexpr):
    a, b = together(tl.trans(a), TOGETHER), together(tl.trans(b), TOGETHER)
    return _half(a, b * 0.0625) + 0.5 * all_tokens(mass)[:, None]


@triton.jit
def _finish(acc, TOGETHER: tl.constexpr):
    a, b, c, d, mass_lo, mass_hi = acc
    return _half_sum(a, b, mass_lo, TOGETHER), _half_sum(c, d, mass_hi, TOGETHER)


@triton.jit
def bytes_of(half, scale):
    """Return the two codes that a half head [M, H] puts in each word: [M, H/2], in the low 16 bits."""
    steps = tl.minimum(tl.maximum(steps_of(half, scale), -8.0), 7.5)
    low, high = parts_of(floor_plus(steps, 8))
    return low + (high << 4)


@triton.jit
def _lost(unit, real, STEPS: tl.constexpr, PADDED: tl.constexpr):
    """Return the sum of squared errors of half heads at a scale of 1 / STEPS.

    `unit` [M, H] are magnitudes of at most 1. The codes end at the seventh step; a magnitude of exactly 8
    steps is counted as in the eighth, whose middle is as far away.
    """
    middle = floor_above(unit, STEPS, 8388608.0) - 8388607.5
    lost = unit * STEPS - middle
    if PADDED:
        lost = tl.where(real[None, :], lost, 0.0)
    return tl.sum(lost * lost, 1) * (1.0 / (STEPS * STEPS))


@triton.jit
def _best_scale(half, D: tl.constexpr):
    """Return the scale of affine.quantize_midrise4; among equally good scales rounding may pick another."""
    dims, real = part_columns(D, 2, half.shape[1])
    PADDED: tl.constexpr = half.shape[1] != D // 2
    absmax = tl.max(tl.abs(half), 1)
    unit = tl.abs(half) * (1.0 / tl.maximum(absmax, 1e-30))[:, None]
    best, least = tl.full(absmax.shape, 8.0, tl.float32), _lost(unit, real, 8.0, PADDED)
    for i in tl.static_range(1, 5):
        lost = _lost(unit, real, 8.0 - 0.25 * i, PADDED)
        best, least = tl.where(lost < least, 8.0 - 0.25 * i, best), tl.minimum(lost, least)
    return stored_scale(absmax, best)


@triton.jit
def _encode(
    lo, hi, buffers, slots, heads, live, which, HEADS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    scale_lo, scale_hi = _best_scale(lo, D), _best_scale(hi, D)
    words = bytes_of(lo, scale_lo) + (bytes_of(hi, scale_hi) << 8)
    buffer = tl.where(which == 0, buffers[0], buffers[1])
    store_words(words, buffer, slots, heads, live, HEADS, D // 4, 1)
    store_scale(scale_lo, buffers, slots, heads, live, HEADS, 2 * which)
    store_scale(scale_hi, buffers, slots, heads, live, HEADS, 2 * which + 1)


DEVICE = KVDevice(
    parts=2,
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
