"""The operators of `qrt.kernels.rmsnorm` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.all_reduce.ref import all_reduce
from qrt.quant import affine


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [..., K], contiguous, in x's dtype."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != torch.float32:
        normal = normal.to(x.dtype).float()
    return (normal * weight.float()).to(x.dtype).contiguous()


def embed_rmsnorm(
    ids: Tensor, table: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the rows ids [T] of table [V, K] times scale, and their norm."""
    rows = table[ids]
    if scale != 1.0:
        rows *= scale
    return rows, rmsnorm(rows, weight, eps)


def add_normed(
    residual: Tensor,
    x: Tensor,
    inner: Tensor | None = None,
    inner_eps: float = 0.0,
    scale: float = 1.0,
    peers: Tensor | None = None,
) -> None:
    """Add x, or if there is `inner` its norm with this weight, times scale to residual in place.

    x is [T, K], or fp32 [S, T, K], whose sum over S, and over the ranks that `peers` names, is rounded to
    residual's dtype first.
    """
    if peers is not None:
        x = all_reduce(x, peers, residual.dtype)
    elif x.dim() == 3:
        x = x.sum(0).to(residual.dtype)
    if inner is not None:
        x = rmsnorm(x, inner, inner_eps)
    residual.add_(x if scale == 1.0 else scale * x)


def add_rmsnorm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    inner: Tensor | None = None,
    inner_eps: float = 0.0,
    scale: float = 1.0,
    peers: Tensor | None = None,
) -> Tensor:
    """Do `add_normed`, and return the norm of the sum."""
    add_normed(residual, x, inner, inner_eps, scale, peers)
    return rmsnorm(residual, weight, eps)


def add_rmsnorm_int8(
    residual: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    inner: Tensor | None = None,
    inner_eps: float = 0.0,
    scale: float = 1.0,
    peers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `add_rmsnorm`, or without a weight the sum, as codes int8 [T, K] and scale fp32 [T]."""
    add_normed(residual, x, inner, inner_eps, scale, peers)
    y = residual if weight is None else rmsnorm(residual, weight, eps)
    codes, token_scale = affine.quantize_tokens(y)
    return codes, token_scale.squeeze(-1)
