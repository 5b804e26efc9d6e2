"""Unpack e2m1 in Triton: words of four codes become planes of exact 4-bit floats.

Sign, exponent and mantissa of a code are put where a 16-bit float has its sign, its last two bits of exponent
and its first bit of mantissa. This is the number, 0.5 as a subnormal one too, times a power of two: 2^-126 in
bf16, 2^-14 in fp16. One product takes it away, which also applies the scale: 4 or 5 instructions for two
weights.
"""

import triton
import triton.language as tl

from qrt.quant.weight.device import times


@triton.jit
def unpack(words, zero, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, scale=None):
    """Unpack plane PLANE of int16 words in DTYPE; see `TiledScheme.unpacker`. There is no zero point."""
    PLACE: tl.constexpr = PLANE % 2 * 8 + PLANE // 2 * 4
    if ASM and DTYPE == tl.bfloat16:
        return _plane(words, scale, PLACE, 6, tl.bfloat16, "bf16x2", "0x72807280")  # 2^102: 2^126 units
    elif ASM and DTYPE == tl.float16:
        return _plane(words, None, PLACE, 9, tl.float16, "f16x2", "0x74007400")  # 2^14
    else:  # as twice the number, which is an integer
        code = words.to(tl.int32) >> PLACE
        exponent, mantissa = (code >> 1) & 3, code & 1
        twice = tl.where(exponent > 0, (2 + mantissa) << tl.maximum(exponent - 1, 0), mantissa)
        number = twice.to(tl.float32) * 0.5
        return tl.where(code & 8 != 0, -number, number).to(DTYPE)


@triton.jit
def _plane(
    words, scale, PLACE: tl.constexpr, MANTISSA: tl.constexpr, DTYPE: tl.constexpr, PAIR: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Return the codes at bit PLACE of each word times FACTOR, and times scale where there is one.

    The last bit of a code goes to bit MANTISSA of a float. scale is int32 of two equal bf16.
    """
    MOVE: tl.constexpr = "shr" if PLACE > MANTISSA else "shl"
    BY: tl.constexpr = PLACE - MANTISSA if PLACE > MANTISSA else MANTISSA - PLACE
    FLOAT: tl.constexpr = f"""shl.b32 s, $1, {12 - PLACE}; and.b32 s, s, 0x80008000; {MOVE}.b32 t, $1, {BY};
        lop3.b32 t, t, {(7 << MANTISSA) * 0x10001}, s, 0xea; mov.b32 o, 0x80008000; fma.rn.{PAIR} $0, t,"""
    if scale is not None:
        bits = tl.inline_asm_elementwise(
            f"{{ .reg .b32 s, t, o; {FLOAT} $2, o; }}", "=r,r,r,r", [words, times(scale, FACTOR)],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = tl.inline_asm_elementwise(
            f"{{ .reg .b32 s, t, o, f; mov.b32 f, {FACTOR}; {FLOAT} f, o; }}", "=r,r", [words],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    return bits.to(DTYPE, bitcast=True)
