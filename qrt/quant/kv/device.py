"""The device functions of a KV format, and the device code that the integer formats share.

Kernels work on a head as two half heads, tiles [.., H]. A half head has `parts` equal parts, each padded to a
power of two: column c of a half is dim (c // P) * (D/2/parts) + c % P, with P = H / parts. Where D is a power
of two, columns are dims. A tile of the cache is whatever `load` returns; only the format's own functions look
inside.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class KVDevice(NamedTuple):
    """A format's device functions, which kernels take as one constexpr.

    There are N tokens and M query heads. K and V are the left operands: unpacked values stay in registers,
    and few heads, as 8 columns, waste little of a tensor core's tile. One dot may serve TOGETHER KV heads,
    whose query heads are TOGETHER equal shares of the M.

    parts       number of parts of a half head, see above
    encode      (lo, hi [M, H] fp32, buffers, slots, heads, live, which, HEADS, D) writes vectors of K (which
                0) or V (which 1); which may be [M] if the format appends
    load        (buffers, slots [N] int64, live [N], head, HEADS, D, H, TOGETHER) -> tile of N tokens
    decode      (tile) -> k_lo, k_hi, v_lo, v_hi [N, H] of one head, in fp32 or the model's dtype
    query       (lo, hi [M, H], scale, N, TOGETHER) -> the query as `scores` takes it. Sums have N rows: 1, or
                as many as a tile, which spares a loop from moving them. scale makes logits base 2
    scores      (query, tile) -> [N, M] fp32, base-2 logits
    weight      (tile, M) -> bits [N, M] or [N, 1] to add to logits in the search for their maximum, or 0; p,
                which is relative to that maximum, then suits `accumulate`
    empty       (M, H, N, TOGETHER) -> accumulator of V times probabilities
    accumulate  (acc, p [N, M] fp32, alpha [M], tile) -> acc * alpha + V.T @ p
    finish      (acc, TOGETHER) -> lo, hi [M, H] fp32
    """

    parts: int
    encode: Any
    load: Any
    decode: Any
    query: Any
    scores: Any
    weight: Any
    empty: Any
    accumulate: Any
    finish: Any

    @property
    def cache_key(self) -> str:
        """The key of compiled kernels; for a plain tuple Triton would use the names of the functions."""
        return "-".join(str(getattr(part, "cache_key", part)) for part in self)

    def __hash__(self) -> int:
        return hash(self.load)  # hashing all functions takes as long as a launch


ASM = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter cannot run PTX
HEADROOM_BITS = tl.constexpr(10.0)  # probability times V scale enters the fp16 dot as at most 2^10
SMALLEST_SCALE = tl.constexpr(2.0**-24)  # as in affine._kv_scale, fp16 subnormals included
LARGEST_SCALE = tl.constexpr(65504.0)


@triton.jit
def part_columns(D: tl.constexpr, PARTS: tl.constexpr, H: tl.constexpr):
    """Return the dims [H] of a half head's columns, and which columns are real."""
    return columns_of(D // 2, PARTS, H, 1)


@triton.jit
def columns_of(W: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr, TOGETHER: tl.constexpr):
    """Return the position of columns [TOGETHER * P] in TOGETHER rows of W, and which columns are real.

    The rows lie side by side; each has PARTS equal parts, which are padded to P / PARTS columns.
    """
    column = tl.arange(0, TOGETHER * P)
    if W == P:
        return column, column < TOGETHER * P
    else:
        part, inside = column % P // (P // PARTS), column % (P // PARTS)
        return column // P * W + part * (W // PARTS) + inside, inside < W // PARTS


@triton.jit
def load_words(
    buffers, slots, live, head, HEADS: tl.constexpr,
    WK: tl.constexpr, PARTS: tl.constexpr, PK: tl.constexpr, WV: tl.constexpr, PV: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Load K words [N, TOGETHER * PK] and V words [TOGETHER * PV, N], int16, of the heads from `head` on.

    K's columns are the `columns_of` WK in PARTS, V's those of WV. The four scales of each token and head come
    as one int64 [N, TOGETHER]. Slots of tokens that are not `live` must be in the buffers too: their words
    are read, their scales are not.
    """
    k_column, k_real = columns_of(WK, PARTS, PK, TOGETHER)
    v_column, v_real = columns_of(WV, 1, PV, TOGETHER)
    first = slots * HEADS + head
    k_at = buffers[0] + (first * WK)[:, None] + k_column[None, :]
    v_at = buffers[1] + (first * WV)[None, :] + v_column[:, None]
    if WK == PK and WV == PV:  # the words of tokens that are not live do not matter: their scale is 0
        k, v = tl.load(k_at), tl.load(v_at)
    else:
        k = tl.load(k_at, mask=live[:, None] & k_real[None, :], other=0)
        v = tl.load(v_at, mask=live[None, :] & v_real[:, None], other=0)
    return k, v, _load_scales(buffers, first, live, TOGETHER)


@triton.jit
def _load_scales(buffers, first, live, TOGETHER: tl.constexpr):
    """Load the four scales of each token and head as one int64; those of all heads fill memory sectors."""
    scales = buffers[2].to(tl.pointer_type(tl.int64)) + first
    if TOGETHER == 1:
        return tl.load(scales, mask=live, other=0)[:, None]
    else:
        scales = scales[:, None] + tl.arange(0, TOGETHER)[None, :]
        return tl.load(scales, mask=live[:, None], other=0)


@triton.jit
def per_row(x, M: tl.constexpr):
    """Repeat x [N, heads] for the rows of each head: [N, M]; for one head it stays [N, 1]."""
    if x.shape[1] == 1:
        return x
    else:
        shape: tl.constexpr = (x.shape[0], x.shape[1], M // x.shape[1])
        return tl.reshape(tl.broadcast_to(x[:, :, None], shape), (x.shape[0], M))


@triton.jit
def own_columns(M: tl.constexpr, TOGETHER: tl.constexpr):
    """Return [M, TOGETHER, 1]: whether a row belongs to a head."""
    share = tl.arange(0, M) // (M // TOGETHER)
    return (share[:, None] == tl.arange(0, TOGETHER)[None, :])[:, :, None]


@triton.jit
def apart(x, TOGETHER: tl.constexpr):
    """Spread x [M, C] to [M, TOGETHER * C], zero outside the columns of a row's own head.

    One dot then serves all heads.
    """
    if TOGETHER == 1:
        return x
    else:
        M: tl.constexpr = x.shape[0]
        C: tl.constexpr = x.shape[1]
        wide = tl.broadcast_to(x[:, None, :], (M, TOGETHER, C))
        return tl.reshape(tl.where(own_columns(M, TOGETHER), wide, tl.zeros_like(wide)), (M, TOGETHER * C))


@triton.jit
def together(x, TOGETHER: tl.constexpr):
    """Undo `apart`: x [M, TOGETHER * C] -> [M, C]; other columns are ignored."""
    if TOGETHER == 1:
        return x
    else:
        M: tl.constexpr = x.shape[0]
        wide = tl.reshape(x, (M, TOGETHER, x.shape[1] // TOGETHER))
        return tl.sum(tl.where(own_columns(M, TOGETHER), wide, 0.0), 1)


@triton.jit
def sums_of(x, N: tl.constexpr):
    """Return the sums of the columns of x fp16 [C, M], fp32, in each row of [N, M].

    For several rows they come from a dot, which leaves them in the layout that the dots of `scores` start
    from.
    """
    if N == 1:
        return tl.sum(x.to(tl.float32), 0)[None, :]
    else:
        return tl.dot(tl.full([N, x.shape[0]], 1.0, tl.float16), x)


@triton.jit
def scale_of(scales, INDEX: tl.constexpr):
    """Return the fp16 at INDEX (k_lo, k_hi, v_lo, v_hi) of each int64, as fp32."""
    return ((scales >> (16 * INDEX)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def words_weight(scales):
    """Return the `weight` [N, heads] of V in units of its scales.

    The largest product of probability and scale becomes 2^HEADROOM_BITS.
    """
    largest = tl.maximum(tl.maximum(scale_of(scales, 2), scale_of(scales, 3)), SMALLEST_SCALE)
    if ASM:
        bits = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=r,r", [largest], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        bits = tl.log2(largest)
    return bits - HEADROOM_BITS


@triton.jit
def no_sums(M: tl.constexpr, N: tl.constexpr):
    """Return the sums of `with_tokens` before the first of N tokens, for M heads."""
    return tl.zeros([N // 16, 8, M], tl.float32)


@triton.jit
def with_tokens(sums, alpha, x):
    """Return sums [N/16, 8, M] times alpha [M] plus those of x [N, M] that each thread holds after a dot."""
    shape: tl.constexpr = (x.shape[0] // 16, 2, 8, x.shape[1])
    alpha = tl.reshape(tl.broadcast_to(alpha[None, :], x.shape), shape)
    return sums * tl.max(alpha, 1) + tl.sum(
        tl.reshape(x, shape), 1
    )  # the maximum of equal numbers, in the layout of the sums


@triton.jit
def all_tokens(sums):
    """Add up the sums [N/16, 8, M] of `with_tokens`: [M]."""
    return tl.sum(tl.sum(sums, 0), 0)


@triton.jit
def store_scale(scale, buffers, slots, heads, live, HEADS: tl.constexpr, index):
    """Write scale number `index` of each vector's four, fp16."""
    tl.store(buffers[2] + (slots * HEADS + heads) * 4 + index, scale, mask=live)


@triton.jit
def store_words(
    words, buffer, slots, heads, live,
    HEADS: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write words int32 [M, P] as int16 words of K or V, W per head."""
    column, real = columns_of(W, PARTS, words.shape[1], 1)
    at = (buffer + (slots * HEADS + heads) * W)[:, None] + column[None, :]
    tl.store(at, words.to(tl.int16), mask=live[:, None] & real[None, :])


@triton.jit
def stored_scale(absmax, steps):
    """Return the fp16 scale absmax / steps of each half head [M], rounded as affine._kv_scale does."""
    scale = tl.div_rn(absmax, steps)
    return tl.minimum(tl.maximum(scale, SMALLEST_SCALE), LARGEST_SCALE).to(tl.float16)


@triton.jit
def steps_of(half, scale):
    """Return half / scale [M, H], rounded like torch's division: fma computes the remainder exactly."""
    scale = scale.to(tl.float32)[:, None]
    if ASM:
        inverse = tl.div_rn(1.0, scale)
        quotient = half * inverse
        less, inverse = tl.broadcast_to(-scale, half.shape), tl.broadcast_to(inverse, half.shape)
        return tl.fma(tl.fma(quotient, less, half), inverse, quotient)
    else:
        return tl.div_rn(half, tl.broadcast_to(scale, half.shape))


@triton.jit
def floor_above(x, factor: tl.constexpr, ABOVE: tl.constexpr):
    """Return floor(x * factor) + ABOVE fp32, for an integer ABOVE >= 2^23 and a sum below 2^24.

    Floats of this size lie 1 apart, so an addition that rounds down gives the floor, in a sixteenth of the
    time of a conversion.
    """
    if ASM:
        operands = [x, factor, ABOVE]
        return tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, $2, $3;", "=r,r,r,r", operands, dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.floor(x * factor) + ABOVE


@triton.jit
def floor_plus(x, PLUS: tl.constexpr):
    """Return floor(x) + PLUS, which is at least 0 and below 2^16, in the low 16 bits of an int32."""
    return floor_above(x, 1.0, 8388608.0 + PLUS).to(tl.int32, bitcast=True)
