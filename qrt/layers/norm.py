"""RMSNorm."""

from __future__ import annotations

from torch import Tensor

from qrt.kernels.rmsnorm import rmsnorm


class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467); weight [K]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> the same shape and dtype, a new tensor."""
        return rmsnorm(x, self.weight, self.eps)
