"""Unquantized weights. Torch multiplies them, except by few tokens on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qrt.errors import UnsupportedError
from qrt.quant.weight.base import Layout, WeightData, WeightScheme
from qrt.quant.weight.product import product


class FP16Scheme(WeightScheme):
    """Run-time tensors: (weight [N, K] in the model dtype,)."""

    name = "fp16"
    spec = None
    layout = Layout.PLAIN
    head = method = None

    def prepare(self, weight: WeightData, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if weight.bits:
            raise UnsupportedError(f"fp16: expected unquantized weights, got {weight.bits}-bit codes")
        return (weight.values.to(device, dtype),)

    def linear_ref(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return F.linear(x, tensors[0], bias)

    def linear_cpu(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return product(x, tensors[0], bias)

    def explain_cpu(self, tensors: Sequence[Tensor]) -> str:
        return "Torch multiplies."

    def out_features(self, tensors: Sequence[Tensor]) -> int:
        return tensors[0].shape[0]


FP16 = FP16Scheme()
