"""`rmsnorm` and `add_rmsnorm` in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K] -> contiguous [..., K] in x's dtype."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal.to(x.dtype).float() * weight.float()).to(x.dtype).contiguous()


def add_rmsnorm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x [T, K] in place, rounded to its dtype; returns the norm of the sum."""
    return rmsnorm(residual.add_(x), weight, eps)
