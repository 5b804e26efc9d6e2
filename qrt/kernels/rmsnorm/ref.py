"""`rmsnorm`, `embed_rmsnorm`, `add_rmsnorm` and `add_rmsnorm_int8` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.quant import affine


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [..., K], contiguous, in x's dtype."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != torch.float32:
        normal = normal.to(x.dtype).float()
    return (normal * weight.float()).to(x.dtype).contiguous()


def embed_rmsnorm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the rows ids [T] of table [V, K], and their norm."""
    rows = table[ids]
    return rows, rmsnorm(rows, weight, eps)


def add_rmsnorm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to residual in place, and return the norm of the sum.

    x is [T, K], or fp32 [S, T, K], whose sum over S is rounded to residual's dtype first.
    """
    if x.dim() == 3:
        x = x.sum(0).to(residual.dtype)
    return rmsnorm(residual.add_(x), weight, eps)


def add_rmsnorm_int8(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `add_rmsnorm` as codes int8 [T, K] and scale fp32 [T]."""
    codes, scale = affine.quantize_tokens(add_rmsnorm(residual, x, weight, eps))
    return codes, scale.squeeze(-1)
