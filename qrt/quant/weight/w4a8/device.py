"""Unpack int4 codes of progressive groups to int8 in Triton: 8 instructions for 8 weights."""

import triton
import triton.language as tl


@triton.jit
def int8_plane(words, step, offset, PLANE: tl.constexpr):
    """Unpack plane PLANE of int16 words to int8: (code - zero) * step.

    `step` is int32. `offset` has 128 - zero * step in each of its four bytes: no byte of code * step + offset
    overflows, and 128 less it is the weight. The four bits of a code begin at the plane's place in
    `tiles.PLACES`.
    """
    PICK: tl.constexpr = "0x7531" if PLANE % 2 else "0x6420"
    SHIFT: tl.constexpr = "shr.b32 t, t, 4;" if PLANE // 2 else ""
    return tl.inline_asm_elementwise(
        f"""{{ .reg .b32 t; prmt.b32 t, $1, $2, {PICK}; {SHIFT} and.b32 t, t, 0x0f0f0f0f;
        mad.lo.u32 t, t, $3, $7; xor.b32 $0, t, 0x80808080; }}""",
        "=r,r,r,r,r,r,r,r,r,r,r", [words, step, offset], dtype=tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def int8_bytes(words, step, offset, PLANE: tl.constexpr):
    """Do as `int8_plane` in plain Triton; step and offset are bytes."""
    PLACE: tl.constexpr = PLANE % 2 * 8 + PLANE // 2 * 4
    codes = (words.to(tl.int32) >> PLACE) & 15
    return (codes * step.to(tl.int32) + offset.to(tl.int32) - 128).to(tl.int8)
