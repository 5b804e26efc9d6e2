"""int8 in Triton: words of two codes to planes of exact integers, 4 to 8 instructions for 4 weights."""

import triton
import triton.language as tl


@triton.jit
def unpack(words, zero, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int16 words -> plane PLANE of code - 128 - zero in DTYPE: byte PLANE."""
    if ASM and DTYPE == tl.bfloat16:
        # bf16 holds 128 + the low 7 bits of a code; it is taken less 256, or less 128 if the top bit is set
        plane = tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t, a, b, minus; mov.b32 minus, 0xbf80bf80; shr.b32 t, $1, {8 * PLANE};
            lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, t, 0x00800080, 0x43004300, 0xae;
            fma.rn.bf16x2 $0, b, minus, a; }}""",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
        return plane - zero.to(tl.bfloat16) if isinstance(zero, tl.tensor) else plane
    elif ASM and DTYPE == tl.float16:  # 1024 + code, minus 1152 + zero
        return tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t; prmt.b32 t, $1, 0x64646464, {"0x4341" if PLANE else "0x4240"};
            sub.f16x2 $0, t, $2; }}""",
            "=r,r,r,r", [words, zero * 0x10001 + 0x64806480], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:  # by way of fp32: the interpreter makes no bf16 of an integer
        return (((words.to(tl.int32) >> 8 * PLANE) & 255) - 128 - zero).to(tl.float32).to(DTYPE)
