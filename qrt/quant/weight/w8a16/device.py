"""Unpack int8 in Triton: words of two codes become planes of exact integers, an instruction a weight."""

import triton
import triton.language as tl

from qrt.quant.weight.device import bf16_plane


@triton.jit
def unpack(words, zero, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, scale=None):
    """Unpack byte PLANE of int16 words: code - 128 - zero in DTYPE; see `TiledScheme.unpacker`."""
    if ASM and DTYPE == tl.bfloat16:
        FIELD: tl.constexpr = "prmt.b32 t, $1, 0, 0x4341;" if PLANE else "and.b32 t, $1, 0x00ff00ff;"
        return bf16_plane(words, zero, scale, FIELD, "0x76007600", 128)
    elif ASM and DTYPE == tl.float16:  # 1024 + code, minus 1152 + zero
        return tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t; prmt.b32 t, $1, 0x64646464, {"0x4341" if PLANE else "0x4240"};
            sub.f16x2 $0, t, $2; }}""",
            "=r,r,r,r", [words, zero * 0x10001 + 0x64806480], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:  # by way of fp32: the interpreter makes no bf16 of an integer
        return (((words.to(tl.int32) >> 8 * PLANE) & 255) - 128 - zero).to(tl.float32).to(DTYPE)
