"""4-bit weights as a CPU multiplies them: unpacked once, to the int8 codes of w8a8."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from qrt.quant import progressive
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight.base import WeightData
from qrt.quant.weight.w8a8.scheme import W8A8


class Int8Rows(NamedTuple):
    """The run-time tensors, in this order; they are w8a8's. Torch has no exact product of int4 and int8.

    codes      [N, K] int8     (code - zero) * step, columns in input order
    channel    [N] fp32        scale of each row
    arrivals   [N] int32       as w8a8's
    """

    codes: Tensor
    channel: Tensor
    arrivals: Tensor

    @classmethod
    def pack(cls, weight: WeightData, dtype: torch.dtype) -> Self:
        """Return the weight, whatever the model's dtype is."""
        assert weight.scale is not None
        split = progressive.split(weight.scale, weight.zero)
        codes = split.codes(weight.values)
        if (perm := weight.perm) is not None:  # of a part some columns are padding, which adds 0
            codes = codes.new_zeros(len(codes), int(perm.max()) + 1).index_add_(1, perm, codes)
        return cls(codes, split.channel, torch.zeros(len(codes), dtype=torch.int32))

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.codes.shape[0]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [T, K]: [T, N] in x's dtype."""
        return W8A8.linear_ref(x, self, bias)

    def multiply_int8(self, x: QuantizedTokens, bias: Tensor | None) -> Tensor:
        """Multiply tokens [T, K] that are quantized already: [T, N] in their dtype."""
        return W8A8.linear_int8_ref(x, self, bias)
