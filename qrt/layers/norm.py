"""RMSNorm, alone or with the residual addition that precedes it."""

from __future__ import annotations

from torch import Tensor

from qrt.kernels.rmsnorm import add_rmsnorm, add_rmsnorm_int8, rmsnorm
from qrt.layers.linear import Linear
from qrt.quant.tokens import QuantizedTokens


class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467); weight [K]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> the same shape and dtype, a new tensor."""
        return rmsnorm(x, self.weight, self.eps)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x in place, then the norm of the sum; both [T, K], x also fp32 [S, T, K] that sums up
        to it (`Linear.shares`)."""
        return add_rmsnorm(residual, x, self.weight, self.eps)

    def add_for(self, reader: Linear, residual: Tensor, x: Tensor) -> Tensor | QuantizedTokens:
        """`add`, quantized already where `reader`, the one Linear that reads it, would do that first."""
        if not reader.int8_tokens:
            return self.add(residual, x)
        codes, scale = add_rmsnorm_int8(residual, x, self.weight, self.eps)
        return QuantizedTokens(codes, scale, residual.dtype)
