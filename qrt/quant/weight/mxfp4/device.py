"""Unpack e2m1 in Triton: words of four codes become planes of exact 4-bit floats.

Sign, exponent and mantissa of a code are put where a 16-bit float has its sign, its last two bits of exponent
and its first bit of mantissa. This is the number, 0.5 as a subnormal one too, times a power of two: 2^-126 in
bf16, 2^-14 in fp16. One product takes it away, which also applies the scale.

In bf16 8 weights take 17 instructions (int4: 9). 4 of them are multiplications of integers, which copy a code
to both places: logic and shifts share one pipe, which is left with 9. By shifts alone it were 10 of 19.
"""

import triton
import triton.language as tl

from qrt.quant.weight.device import times


@triton.jit
def unpack(words, zero, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, scale=None):
    """Unpack plane PLANE of int16 words in DTYPE; see `TiledScheme.unpacker`. There is no zero point."""
    PLACE: tl.constexpr = PLANE % 2 * 8 + PLANE // 2 * 4
    if ASM and DTYPE == tl.bfloat16:  # to bits 6 and 12; 2^102 is 2^126 in units
        HIGH: tl.constexpr = PLANE // 2  # half of a byte
        FIELD: tl.constexpr = f"""shr.b32 t, $1, {PLANE % 2 * 8};
            and.b32 t, t, {"0x00f000f0" if HIGH else "0x000f000f"};
            mul.lo.u32 t, t, {260 if HIGH else 4160}; and.b32 t, t, 0x81c081c0;"""
        return _plane(words, scale, FIELD, tl.bfloat16, "bf16x2", "0x72807280")
    elif ASM and DTYPE == tl.float16:  # to bit 9, and the sign to bit 15; 2^14
        SHIFT: tl.constexpr = "shr.b32 t, $1, 3;" if PLACE == 12 else f"shl.b32 t, $1, {9 - PLACE};"
        FIELD: tl.constexpr = f"""{SHIFT} shl.b32 s, $1, {12 - PLACE}; and.b32 s, s, 0x80008000;
            lop3.b32 t, t, 0x0e000e00, s, 0xea;"""
        return _plane(words, None, FIELD, tl.float16, "f16x2", "0x74007400")
    else:  # as twice the number, which is an integer
        code = words.to(tl.int32) >> PLACE
        exponent, mantissa = (code >> 1) & 3, code & 1
        twice = tl.where(exponent > 0, (2 + mantissa) << tl.maximum(exponent - 1, 0), mantissa)
        number = twice.to(tl.float32) * 0.5
        return tl.where(code & 8 != 0, -number, number).to(DTYPE)


@triton.jit
def _plane(
    words, scale, FIELD: tl.constexpr, DTYPE: tl.constexpr, PAIR: tl.constexpr, FACTOR: tl.constexpr
):  # fmt: skip
    """Return the floats that FIELD makes in `t` of words $1 times FACTOR, and times scale if there is one.

    scale is int32 of two equal bf16.
    """
    START: tl.constexpr = f".reg .b32 s, t, o, f; mov.b32 o, 0x80008000; {FIELD}"
    if scale is not None:
        bits = tl.inline_asm_elementwise(
            f"{{ {START} fma.rn.{PAIR} $0, t, $2, o; }}", "=r,r,r,r", [words, times(scale, FACTOR)],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = tl.inline_asm_elementwise(
            f"{{ {START} mov.b32 f, {FACTOR}; fma.rn.{PAIR} $0, t, f, o; }}", "=r,r", [words],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    return bits.to(DTYPE, bitcast=True)
