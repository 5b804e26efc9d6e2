"""Activations as int8 in Triton, for kernels that feed int8 products.

The codes of tokens are those of `affine.quantize_tokens`, bit for bit; `Digits` are written here too.
"""

import triton
import triton.language as tl

from qrt.quant import digits

GROUP = tl.constexpr(digits.GROUP)
STEPS = tl.constexpr(float(digits.STEPS))


@triton.jit
def token_scale(peak):
    """Return the scale fp32 of tokens whose largest magnitude is `peak` fp32, a scalar or a tensor."""
    return tl.div_rn(tl.maximum(peak, 1e-10), 127.0)


@triton.jit
def token_codes(x, scale, ASM: tl.constexpr):
    """Return the codes int8 of x fp32; scale fp32 broadcasts to x. ASM False asks for plain Triton."""
    if ASM:
        return _codes(x, -scale, tl.div_rn(1.0, scale))
    else:
        return tl.floor(tl.div_rn(x, tl.broadcast_to(scale, x.shape)) + 0.5).to(tl.int8)


@triton.jit
def store_token(blocks, codes, scale, N, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """Write the codes and the scale of one token of N values at these pointers.

    `blocks` is a tuple of [BLOCK], zero beyond N.
    """
    peak = tl.zeros([BLOCK], tl.float32)
    for b in tl.static_range(len(blocks)):
        peak = tl.maximum(peak, tl.abs(blocks[b].to(tl.float32)))
    own = token_scale(tl.max(peak, 0))
    for b in tl.static_range(len(blocks)):
        i = b * BLOCK + tl.arange(0, BLOCK)
        tl.store(codes + i, token_codes(blocks[b].to(tl.float32), own, ASM), mask=i < N)
    tl.store(scale, own)


@triton.jit
def larger(a, b):
    """Return the larger of two numbers in a reduction, NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def digits_of(x, largest, AXIS: tl.constexpr):
    """Return 256 * high + low, int32, and the scales of x fp32, whose groups lie along AXIS.

    `largest` holds the groups' largest magnitudes, as `larger` finds them. A value that is not finite makes
    the scale of its group not finite.
    """
    largest = larger(largest, 1e-30)
    steps = x * tl.expand_dims(1.0 / largest * STEPS, AXIS)
    # rounds to nearest, because floats of this size lie 1 apart
    return (steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000, largest / STEPS


@triton.jit
def store_digits(x, codes, facts, row, group, ROWS, GROUPS, ROOM: tl.constexpr):
    """Write x fp32 [M, 128 * N] as `Digits` that are padded to ROOM tokens.

    x has the rows `row` [M] of ROWS and the groups `group` [N] of GROUPS.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1] // GROUP
    x = tl.reshape(x, (M, N, GROUP))
    x, scale = digits_of(x, tl.reduce(tl.abs(x), 2, larger), 2)
    first, second = tl.split(tl.permute(tl.reshape(x, (M, N, 2, GROUP // 2)), (0, 1, 3, 2)))
    inside = (row < ROWS)[:, None] & (group < GROUPS)[None, :]
    place = group[None, :] * ROOM + row[:, None]
    _store_groups(first, second, scale, tl.sum(x, 2), codes, facts, place, inside, GROUPS * ROOM, ROOM)


@triton.jit
def store_digits_of_halves(first, second, codes, facts, row, group, inside, GROUPS, ROOM: tl.constexpr):
    """Write M groups as `Digits` that are padded to ROOM tokens.

    Each is group `group` [M] of GROUPS in row `row` [M]; its halves are first and second fp32 [M, 64]. Groups
    that are not `inside` [M] are not written.
    """
    largest = larger(tl.reduce(tl.abs(first), 1, larger), tl.reduce(tl.abs(second), 1, larger))
    first, scale = digits_of(first, largest, 1)
    second, scale = digits_of(second, largest, 1)
    total = tl.sum(first, 1) + tl.sum(second, 1)
    place = group * ROOM + row
    _store_groups(first, second, scale, total, codes, facts, place, inside, GROUPS * ROOM, ROOM)


@triton.jit
def _store_groups(first, second, scale, total, codes, facts, place, inside, rows, ROOM: tl.constexpr):
    """Write the digits of groups [..], whose halves are first and second int32 [.., 64].

    `place` [..] is the position of each among all `rows` pairs of group and token.
    """
    AXIS: tl.constexpr = len(first.shape) - 1
    HALF: tl.constexpr = GROUP // 2
    tl.store(facts + place, scale, mask=inside)
    tl.store(facts + rows + place, total.to(tl.float32), mask=inside)
    word = (
        place + place // ROOM * ROOM
    )  # the token's high digits; low digits follow the high ones of all the group's tokens
    words = codes.to(tl.pointer_type(tl.int16)) + tl.expand_dims(word * HALF, AXIS) + tl.arange(0, HALF)
    high = ((first + 128) >> 8) & 0xFF | (((second + 128) >> 8) << 8)
    low = first & 0xFF | (second << 8)
    mask = tl.expand_dims(inside, AXIS)
    tl.store(words, high.to(tl.int16), mask=mask)  # two lanes at once
    tl.store(words + ROOM * HALF, low.to(tl.int16), mask=mask)


@triton.jit
def _codes(x, minus_scale, inverse):
    """Return floor(x / scale + 0.5) as an exact division gives it, in 8 instructions per value, no branch.

    fma computes the remainder of a quotient exactly. It corrects the quotient twice: to within an ulp, then
    to the nearest (Markstein 1990, doi:10.1147/rd.341.0111; `inverse` is 1 / scale rounded to nearest).
    Adding 1.5 * 2^23 and rounding down leaves the floor in the low byte.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .f32 a, b, c, d, r; .reg .b32 i, j, k, l;
        mul.rn.f32 a, $1, $9; fma.rn.f32 r, a, $5, $1; fma.rn.f32 a, r, $9, a;
        fma.rn.f32 r, a, $5, $1; fma.rn.f32 a, r, $9, a;
        mul.rn.f32 b, $2, $10; fma.rn.f32 r, b, $6, $2; fma.rn.f32 b, r, $10, b;
        fma.rn.f32 r, b, $6, $2; fma.rn.f32 b, r, $10, b;
        mul.rn.f32 c, $3, $11; fma.rn.f32 r, c, $7, $3; fma.rn.f32 c, r, $11, c;
        fma.rn.f32 r, c, $7, $3; fma.rn.f32 c, r, $11, c;
        mul.rn.f32 d, $4, $12; fma.rn.f32 r, d, $8, $4; fma.rn.f32 d, r, $12, d;
        fma.rn.f32 r, d, $8, $4; fma.rn.f32 d, r, $12, d;
        add.rn.f32 a, a, 0f3f000000; add.rm.f32 a, a, 0f4b400000; mov.b32 i, a;
        add.rn.f32 b, b, 0f3f000000; add.rm.f32 b, b, 0f4b400000; mov.b32 j, b;
        add.rn.f32 c, c, 0f3f000000; add.rm.f32 c, c, 0f4b400000; mov.b32 k, c;
        add.rn.f32 d, d, 0f3f000000; add.rm.f32 d, d, 0f4b400000; mov.b32 l, d;
        prmt.b32 i, i, j, 0x0040; prmt.b32 k, k, l, 0x0040; prmt.b32 $0, i, k, 0x5410; }""",
        "=r,f,f,f,f,f,f,f,f,f,f,f,f",
        [x, minus_scale, inverse],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )
