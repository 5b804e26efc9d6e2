"""Unpack int4 in Triton: words of four codes become planes of exact small integers.

In fp16 a code is written into the mantissa of a power of two (`lop3`), and the power leaves with the zero
point: 9 to 11 instructions for 8 weights (Kim et al. 2022, arXiv:2211.10017). The power plus the zero point
is an integer; its float is made by adding to the bits. In bf16 a code is a number as it lies: 9 instructions.
"""

import triton
import triton.language as tl

from qrt.quant.weight.device import bf16_plane


@triton.jit
def unpack(words, zero, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, scale=None):
    """Unpack plane PLANE of int16 words: code - 8 - zero in DTYPE; see `TiledScheme.unpacker`.

    The four bits of a code begin at the plane's place in `tiles.PLACES`.
    """
    PLACE: tl.constexpr = PLANE % 2 * 8 + PLANE // 2 * 4
    if ASM and DTYPE == tl.bfloat16:
        MASK: tl.constexpr = "0x00f000f0" if PLANE // 2 else "0x000f000f"
        FACTOR: tl.constexpr = "0x74007400" if PLANE // 2 else "0x76007600"  # 2^105: of 16 codes; 2^109
        FIELD: tl.constexpr = f"shr.b32 t, $1, {PLANE % 2 * 8}; and.b32 t, t, {MASK};"
        return bf16_plane(words, zero, scale, FIELD, FACTOR, 8)
    elif ASM and DTYPE == tl.float16 and PLACE % 8 == 0:  # 1024 + code, minus 1032 + zero
        return tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t; shr.b32 t, $1, {PLACE};
            lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; sub.f16x2 $0, t, $2; }}""",
            "=r,r,r,r", [words, zero * 0x10001 + 0x64086408], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM and DTYPE == tl.float16:  # (1024 + 16 code) / 16, minus 72 + zero
        return tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t, frac; mov.b32 frac, 0x2c002c00; shr.b32 t, $1, {PLACE - 4};
            lop3.b32 t, t, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 $0, t, frac, $2; }}""",
            "=r,r,r,r", [words, zero * 0x100010 - 0x2B7F2B80], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:  # by way of fp32: the interpreter makes no bf16 of an integer
        return (((words.to(tl.int32) >> PLACE) & 15) - 8 - zero).to(tl.float32).to(DTYPE)


RAW_OFFSET = 136.0  # what `raw` adds to code - 8


@triton.jit
def raw(words, zero, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Unpack plane PLANE of int16 words: 128 + code in bf16, exact.

    It takes two instructions for two weights, as no zero point is taken away.
    """
    return tl.inline_asm_elementwise(
        f"""{{ .reg .b32 t; shr.b32 t, $1, {PLANE % 2 * 8 + PLANE // 2 * 4};
        lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }}""",
        "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
