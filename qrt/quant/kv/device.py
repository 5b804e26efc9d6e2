"""What a KV format hands to the attention kernels, and the device code that the integer formats share.

A head is worked on as two half heads, tiles [.., H]. A half head is cut into `parts` equal parts, each
padded to a power of two: column c of a half is its dim (c // P) * (D/2/parts) + c % P, P = H / parts. Where
D is a power of two columns are dims. A tile of the cache is whatever `load` returns; only the format's own
functions look inside.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class KVDevice(NamedTuple):
    """A format's device functions, passed to the kernel bodies as one constexpr.

    Of N tokens and M query heads. K and V are the left operands, so that what is unpacked stays in registers
    and few heads, as 8 columns, waste little of a tensor core's tile. TOGETHER KV heads may be attended by
    one dot: their query heads are as many equal shares of the M.

    parts       of a half head, see above
    encode      (lo, hi [M, H] fp32, buffers, slots, heads, live, which, HEADS, D) writes
                vectors of K (which 0) or V (which 1); of a format that appends which may be [M]
    load        (buffers, slots [N] int64, live [N], head, HEADS, D, H, TOGETHER) -> tile of N tokens
    decode      (tile) -> k_lo, k_hi, v_lo, v_hi [N, H] of one head, in fp32 or the model's dtype
    query       (lo, hi [M, H], scale, N, TOGETHER) -> what `scores` needs of it, sums in N rows: 1, or a
                tile's, which need not be moved in a loop that first learns them; scale turns logits into
                base 2
    scores      (query, tile) -> [N, M] fp32, base-2 logits
    weight      (tile, M) -> bits [N, M] or [N, 1] to add to logits where their largest is sought, or 0; p,
                which is relative to that, then suits `accumulate`
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
        """What Triton keys compiled kernels by: of a plain tuple it would take the names of the functions."""
        return "-".join(str(getattr(part, "cache_key", part)) for part in self)

    def __hash__(self) -> int:
        return hash(self.load)  # of all functions it would take as long as a launch


ASM = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter knows no PTX
HEADROOM_BITS = tl.constexpr(10.0)  # probability times V scale enters the fp16 dot as at most 2^10
SMALLEST_SCALE = tl.constexpr(2.0**-24)  # as in affine._kv_scale: the fp16 subnormals count
LARGEST_SCALE = tl.constexpr(65504.0)


@triton.jit
def part_columns(D: tl.constexpr, PARTS: tl.constexpr, H: tl.constexpr):
    """dims [H] of a half head's columns, and which of them are real."""
    return columns_of(D // 2, PARTS, H, 1)


@triton.jit
def columns_of(W: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr, TOGETHER: tl.constexpr):
    """Rows of W side by side, each cut into PARTS equal parts that are padded to P / PARTS columns: where
    columns [TOGETHER * P] are, and which of them are real."""
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
    """K words [N, TOGETHER * PK] and V words [TOGETHER * PV, N], int16, of the heads from `head` on, in
    `columns_of` WK in PARTS and of WV, and the four scales of each token and head as one int64 [N, TOGETHER].

    Slots of tokens that are not `live` must be in the buffers too: their words are read, not their scales.
    """
    k_column, k_real = columns_of(WK, PARTS, PK, TOGETHER)
    v_column, v_real = columns_of(WV, 1, PV, TOGETHER)
    first = slots * HEADS + head
    k_at = buffers[0] + (first * WK)[:, None] + k_column[None, :]
    v_at = buffers[1] + (first * WV)[None, :] + v_column[:, None]
    if WK == PK and WV == PV:  # tokens that are not live have no scale: their words may be any
        k, v = tl.load(k_at), tl.load(v_at)
    else:
        k = tl.load(k_at, mask=live[:, None] & k_real[None, :], other=0)
        v = tl.load(v_at, mask=live[None, :] & v_real[:, None], other=0)
    return k, v, _load_scales(buffers, first, live, TOGETHER)


@triton.jit
def _load_scales(buffers, first, live, TOGETHER: tl.constexpr):
    """The four scales of each token and head as one int64: those of all heads fill sectors of memory."""
    scales = buffers[2].to(tl.pointer_type(tl.int64)) + first
    if TOGETHER == 1:
        return tl.load(scales, mask=live, other=0)[:, None]
    else:
        scales = scales[:, None] + tl.arange(0, TOGETHER)[None, :]
        return tl.load(scales, mask=live[:, None], other=0)


@triton.jit
def per_row(x, M: tl.constexpr):
    """x [N, heads] -> [N, M]: every head's for its rows; of one head [N, 1]."""
    if x.shape[1] == 1:
        return x
    else:
        shape: tl.constexpr = (x.shape[0], x.shape[1], M // x.shape[1])
        return tl.reshape(tl.broadcast_to(x[:, :, None], shape), (x.shape[0], M))


@triton.jit
def own_columns(M: tl.constexpr, TOGETHER: tl.constexpr):
    """[M, TOGETHER, 1]: which of the heads is the row's."""
    share = tl.arange(0, M) // (M // TOGETHER)
    return (share[:, None] == tl.arange(0, TOGETHER)[None, :])[:, :, None]


@triton.jit
def apart(x, TOGETHER: tl.constexpr):
    """x [M, C] -> [M, TOGETHER * C], zero outside of the columns of a row's own head: so one dot is enough
    for all heads."""
    if TOGETHER == 1:
        return x
    else:
        M: tl.constexpr = x.shape[0]
        C: tl.constexpr = x.shape[1]
        wide = tl.broadcast_to(x[:, None, :], (M, TOGETHER, C))
        return tl.reshape(tl.where(own_columns(M, TOGETHER), wide, tl.zeros_like(wide)), (M, TOGETHER * C))


@triton.jit
def together(x, TOGETHER: tl.constexpr):
    """The inverse: x [M, TOGETHER * C] -> [M, C], whatever lies outside."""
    if TOGETHER == 1:
        return x
    else:
        M: tl.constexpr = x.shape[0]
        wide = tl.reshape(x, (M, TOGETHER, x.shape[1] // TOGETHER))
        return tl.sum(tl.where(own_columns(M, TOGETHER), wide, 0.0), 1)


@triton.jit
def sums_of(x, N: tl.constexpr):
    """The sums of the columns of x fp16 [C, M], fp32, in each row of [N, M]. Where there are many they come
    from a dot, which leaves them where the dots of `scores` begin."""
    if N == 1:
        return tl.sum(x.to(tl.float32), 0)[None, :]
    else:
        return tl.dot(tl.full([N, x.shape[0]], 1.0, tl.float16), x)


@triton.jit
def scale_of(scales, INDEX: tl.constexpr):
    """The fp16 at INDEX (k_lo, k_hi, v_lo, v_hi) of each int64, as fp32."""
    return ((scales >> (16 * INDEX)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def words_weight(scales):
    """The `weight` of V in units of its scales [N, heads]: the largest probability times scale becomes
    2^HEADROOM_BITS."""
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
    """Of `with_tokens` of N tokens and M heads, before the first."""
    return tl.zeros([N // 16, 8, M], tl.float32)


@triton.jit
def with_tokens(sums, alpha, x):
    """sums [N/16, 8, M] times alpha [M] plus those of x [N, M] that one thread holds where a dot left x."""
    shape: tl.constexpr = (x.shape[0] // 16, 2, 8, x.shape[1])
    alpha = tl.reshape(tl.broadcast_to(alpha[None, :], x.shape), shape)
    return sums * tl.max(alpha, 1) + tl.sum(tl.reshape(x, shape), 1)  # of equal ones: where the sums are


@triton.jit
def all_tokens(sums):
    """sums [N/16, 8, M] of `with_tokens` -> [M]."""
    return tl.sum(tl.sum(sums, 0), 0)


@triton.jit
def store_scale(scale, buffers, slots, heads, live, HEADS: tl.constexpr, index):
    """One fp16 of each vector's four."""
    tl.store(buffers[2] + (slots * HEADS + heads) * 4 + index, scale, mask=live)


@triton.jit
def store_words(
    words, buffer, slots, heads, live,
    HEADS: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """words int32 [M, P] as int16 words of K or V, W of a head."""
    column, real = columns_of(W, PARTS, words.shape[1], 1)
    at = (buffer + (slots * HEADS + heads) * W)[:, None] + column[None, :]
    tl.store(at, words.to(tl.int16), mask=live[:, None] & real[None, :])


@triton.jit
def stored_scale(absmax, steps):
    """The fp16 scale absmax / steps of each half head [M], as affine._kv_scale rounds it."""
    scale = tl.div_rn(absmax, steps)
    return tl.minimum(tl.maximum(scale, SMALLEST_SCALE), LARGEST_SCALE).to(tl.float16)


@triton.jit
def steps_of(half, scale):
    """half / scale [M, H], rounded like torch's division: with fma a quotient's remainder is exact."""
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
    """floor(x * factor) + ABOVE fp32, for ABOVE an integer of 2^23 and more and a sum of less than 2^24.

    So large numbers lie 1 apart: an addition that rounds down, a sixteenth of what a conversion takes.
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
    """floor(x) + PLUS, which is at least 0 and below 2^16, as the low 16 bits of an int32."""
    return floor_above(x, 1.0, 8388608.0 + PLUS).to(tl.int32, bitcast=True)
