"""Turn codes of weight-only schemes into bf16 in Triton, for their `unpack`.

Read as a bf16, the low 8 bits of a 16-bit word are their value times 2^-133: a subnormal number below 128,
one of the first normal ones from there on. So a mask makes floats of two codes. One fused multiply-add of
both then takes their zero points away. Where the zero point is in the middle, it scales them instead: the
product with a scale is exact, so the weight is rounded once.
"""

import triton
import triton.language as tl

from qrt.quant.weight import tiles

_MINUS = tl.constexpr("0xf600f600")  # -2^109, twice: n * 2^-133 becomes -n units
_UNIT = tl.constexpr(1 / tiles.BF16_UNIT)


@triton.jit
def unit_of(DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return the factor for planes of weights in DTYPE, or for their sums."""
    if ASM and DTYPE == tl.bfloat16:
        return _UNIT
    else:
        return 1.0


@triton.jit
def bf16_plane(
    words, zero, scale, FIELD: tl.constexpr, FACTOR: tl.constexpr, MIDPOINT: tl.constexpr
):  # fmt: skip
    """Return code - MIDPOINT - zero, or with a scale (code - MIDPOINT) * scale, as bf16 in `tiles.BF16_UNIT`.

    zero is int32, or 0; scale is int32 of two equal bf16. FIELD is PTX that leaves the two codes of a word $1
    in `t`; FACTOR, twice, makes units of them.
    """
    OFFSET: tl.constexpr = "0xb500b500" if MIDPOINT == 8 else "0xb700b700"  # -MIDPOINT units
    if scale is not None:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; {FIELD} fma.rn.bf16x2 $0, t, $2, $4; }}", "=r,r,r,r,r,r",
            [words, times(scale, FACTOR), times(scale, OFFSET)], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif isinstance(zero, tl.tensor):
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, f; mov.b32 f, {FACTOR}; {FIELD} fma.rn.bf16x2 $0, t, f, $2; }}", "=r,r,r,r",
            [words, times((zero + MIDPOINT) * 0x10001, _MINUS)], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, f, o; mov.b32 f, {FACTOR}; mov.b32 o, {OFFSET}; {FIELD} "
            "fma.rn.bf16x2 $0, t, f, o; }", "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def times(pair, FACTOR: tl.constexpr):
    """Multiply the two bf16 of an int32 by FACTOR; sm_80 has no instruction for that."""
    return tl.inline_asm_elementwise(
        f"{{ .reg .b32 f, o; mov.b32 f, {FACTOR}; mov.b32 o, 0x80008000; fma.rn.bf16x2 $0, $1, f, o; }}",
        "=r,r", [pair], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
