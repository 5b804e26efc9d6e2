"""MXFP4 weights as torch multiplies them on a CPU: by its product of 4-bit integers, every input twice.

Twice an e2m1 number is an integer from -12 to 12, which is the sum of two 4-bit ones. Torch's kernel adds the
products of both in fp32, so that nothing but the result is rounded. A weight takes 8 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from qrt.quant import e2m1
from qrt.quant.spec import Codes
from qrt.quant.weight.base import WeightData
from qrt.quant.weight.w4a16 import packed as int4

_MIDPOINT = 8
_TWICE = (2 * torch.tensor(e2m1.VALUES)).int()
_FIRST = _TWICE.clamp(-_MIDPOINT, _MIDPOINT - 1)
_HALVES = (_FIRST + _MIDPOINT | _TWICE - _FIRST + _MIDPOINT << 4).to(torch.uint8)  # two codes for each


class PackedMXFP4(int4.PackedInt4):
    """The run-time tensors of w4a16, of a weight [N, 2K] for x beside x."""

    @classmethod
    def pack(cls, weight: WeightData, dtype: torch.dtype) -> Self | None:
        """Return the weight for a model in `dtype`; None where torch has no fast product on this CPU."""
        if weight.scale is None or dtype != torch.bfloat16:
            return None
        both = e2m1.looked_up(_HALVES.to(weight.values.device), weight.values)
        codes = torch.cat((both & 15, both >> 4), 1)
        scale = weight.scale / 2
        halves = replace(weight, values=codes, scale=torch.cat((scale, scale), 1), codes=Codes.INTEGERS)
        return super().pack(halves, dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [T, K] bf16: [T, N] bf16; a bias is added to the rounded sum."""
        return super().multiply(torch.cat((x, x), 1) if 0 < len(x) <= int4.FEW_TOKENS else x, bias)

    def dequantize(self, outputs: slice) -> Tensor:
        """Return the weight of some outputs, bf16 [K, n]."""
        first, second = super().dequantize(outputs).chunk(2)
        return first + second
