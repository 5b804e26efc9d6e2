"""8-bit weights as torch multiplies them on a CPU: `aten::_weight_int8pack_mm`, in bf16, group by group.

The kernel of torch has one scale per output channel. So each group of inputs is a product of its own, rounded
to bf16 before the groups are added in fp32. The error of y is at most 2^-8 of the sum of the groups'
magnitudes, and the last rounding. In fp32 and fp16 the kernel is a scalar loop, so models in those dtypes
keep the tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qrt.quant.weight.base import WeightData
from qrt.quant.weight.product import product

FEW_TOKENS = 8  # the kernel converts for every four tokens; with more it is done once, here


class PackedInt8(NamedTuple):
    """The run-time tensors, in this order.

    codes    [K/G, N, G] int8    code - 128
    scale    [K/G, N] bf16
    perm     [K] int64           as in WeightData; no elements when the identity
    """

    codes: Tensor
    scale: Tensor
    perm: Tensor

    @classmethod
    def pack(cls, weight: WeightData, dtype: torch.dtype) -> PackedInt8 | None:
        """Return the weight for a model in `dtype`; None where torch has no fast product for it.

        It has none for dtypes other than bf16, zero points, and groups that are not a multiple of 32.
        """
        if dtype != torch.bfloat16 or weight.bits != 8 or weight.scale is None or weight.zero is not None:
            return None
        group = weight.in_features // weight.scale.shape[1]
        if group % 32:
            return None
        codes = (weight.values ^ 128).view(torch.int8).unflatten(1, (-1, group)).transpose(0, 1)
        scale = weight.scale.T.to(dtype)
        perm = torch.empty(0, dtype=torch.int64) if weight.perm is None else weight.perm
        return cls(codes.contiguous(), scale.contiguous(), perm)

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.codes.shape[1]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [T, K] bf16: [T, N] bf16."""
        if self.perm.numel():
            x = x.index_select(1, self.perm)
        if x.shape[0] > FEW_TOKENS:
            weight = (self.codes.to(x.dtype) * self.scale[..., None]).transpose(0, 1)
            return product(x, weight.flatten(1), bias)
        groups = x.unflatten(1, (-1, self.codes.shape[2])).transpose(0, 1)
        groups = groups.clone(memory_format=torch.contiguous_format)  # the kernel loads aligned vectors
        total = torch.zeros(x.shape[0], self.codes.shape[1], dtype=torch.float32)
        for part, codes, scale in zip(groups, self.codes, self.scale, strict=True):
            total += torch.ops.aten._weight_int8pack_mm(part, codes, scale)
        return (total if bias is None else total.add_(bias)).to(x.dtype)
