"""`rmsnorm`, and what comes with it, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.quant import affine


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K] -> contiguous [..., K] in x's dtype."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal.to(x.dtype).float() * weight.float()).to(x.dtype).contiguous()


def embed_rmsnorm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """ids [T] -> the rows of table [V, K], and their norm."""
    rows = table[ids]
    return rows, rmsnorm(rows, weight, eps)


def add_rmsnorm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x [T, K], or the sum of fp32 [S, T, K], in place, rounded to its dtype; returns the norm of
    the sum."""
    if x.dim() == 3:
        x = x.sum(0).to(residual.dtype)
    return rmsnorm(residual.add_(x), weight, eps)


def add_rmsnorm_int8(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rmsnorm` as codes int8 [T, K] and scale fp32 [T]."""
    codes, scale = affine.quantize_tokens(add_rmsnorm(residual, x, weight, eps))
    return codes, scale.squeeze(-1)
