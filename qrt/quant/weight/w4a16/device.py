"""int4 in Triton: words of four codes to planes of exact small integers.

The 16-bit paths make a float of a code by writing it into the mantissa of a power of two (`lop3`) and taking
that power away again: 10 to 11 instructions for 8 weights (Kim et al. 2022, arXiv:2211.10017).
"""

import triton
import triton.language as tl


@triton.jit
def unpack(words, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int16 words -> plane PLANE of code - 8 in DTYPE: bits 4*PLANE..4*PLANE+3."""
    if ASM and DTYPE == tl.bfloat16:  # 128 + code, times 1, minus 136: bf16 has fma but no sub on sm_80
        return tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t, one, off; mov.b32 one, 0x3f803f80; mov.b32 off, 0xc308c308;
            shr.b32 t, $1, {4 * PLANE}; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, t, one, off; }}""",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM and DTYPE == tl.float16 and PLANE % 2 == 0:  # 1024 + code - 1032
        return tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t, off; mov.b32 off, 0x64086408;
            shr.b32 t, $1, {4 * PLANE}; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea;
            sub.f16x2 $0, t, off; }}""",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM and DTYPE == tl.float16:  # (1024 + 16 code) / 16 - 72
        return tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t, frac, off; mov.b32 frac, 0x2c002c00; mov.b32 off, 0xd480d480;
            shr.b32 t, $1, {4 * PLANE - 4}; lop3.b32 t, t, 0x00f000f0, 0x64006400, 0xea;
            fma.rn.f16x2 $0, t, frac, off; }}""",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:  # by way of fp32: the interpreter makes no bf16 of an integer
        return (((words.to(tl.int32) >> 4 * PLANE) & 15) - 8).to(tl.float32).to(DTYPE)
