"""Linear: a weight in the run-time layout of its scheme, and the one operator that multiplies by it."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.linear import linear, prepare
from qrt.kernels.linear.weight import Weight
from qrt.quant.weight import WeightData


class Linear:
    """y = x @ W.T + bias with W [N, K] held as `scheme` keeps it.

    scheme    a name in WEIGHT_SCHEMES
    tensors   the scheme's run-time tensors, in its order
    bias      [N] in the model dtype, or None
    """

    def __init__(self, scheme: str, tensors: tuple[Tensor, ...], bias: Tensor | None = None) -> None:
        self.scheme = scheme
        self.tensors = Weight(tensors)
        self.bias = bias

    @classmethod
    def pack(cls, scheme: str, weight: WeightData, device: torch.device, dtype: torch.dtype) -> Linear:
        """Lay a canonical weight out for the kernels of `scheme`; raises as `WeightScheme.prepare` does."""
        bias = None if weight.bias is None else weight.bias.to(device, dtype)
        return cls(scheme, prepare(scheme, weight, device, dtype), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""
        return linear(x, self.tensors, self.bias, self.scheme)

    def parameters(self) -> list[Tensor]:
        """Every tensor it holds."""
        return self.tensors if self.bias is None else [*self.tensors, self.bias]
