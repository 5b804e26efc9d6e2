"""int4 in Triton: words of four codes to four planes of exact small integers.

The 16-bit paths make a float of a code by writing it into the mantissa of a power of two (`lop3`) and taking
that power away again: 9 to 11 instructions for 8 weights (Kim et al. 2022, arXiv:2211.10017).
"""

import triton
import triton.language as tl


@triton.jit
def unpack(words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int16 words -> planes 0..3 of code - 8 in DTYPE; plane p is bits 4p..4p+3."""
    if ASM and DTYPE == tl.bfloat16:  # 128 + code, times 1, minus 136: bf16 has fma but no sub on sm_80
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, one, off; mov.b32 one, 0x3f803f80; mov.b32 off, 0xc308c308;
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea; shr.b32 t, $4, 4;
            lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea; shr.b32 t, $4, 8;
            lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea; shr.b32 t, $4, 12;
            lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, $0, one, off; fma.rn.bf16x2 $1, $1, one, off;
            fma.rn.bf16x2 $2, $2, one, off; fma.rn.bf16x2 $3, $3, one, off; }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif ASM and DTYPE == tl.float16:  # 1024 + code - 1032, and (1024 + 16 code) / 16 - 72
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, off, frac, off16; shr.b32 t, $4, 8;
            mov.b32 off, 0x64086408; mov.b32 frac, 0x2c002c00; mov.b32 off16, 0xd480d480;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea; lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea; lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
            sub.f16x2 $0, $0, off; fma.rn.f16x2 $1, $1, frac, off16;
            sub.f16x2 $2, $2, off; fma.rn.f16x2 $3, $3, frac, off16; }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        n = words.to(tl.int32)  # by way of fp32: the interpreter makes no bf16 of an integer
        return (
            ((n & 15) - 8).to(tl.float32).to(DTYPE),
            (((n >> 4) & 15) - 8).to(tl.float32).to(DTYPE),
            (((n >> 8) & 15) - 8).to(tl.float32).to(DTYPE),
            (((n >> 12) & 15) - 8).to(tl.float32).to(DTYPE),
        )
