"""The operators of `qrt.kernels.layernorm` on the GPU, by the kernel of `rmsnorm`."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.rmsnorm.kernel import launch_add, launch_rows


def layernorm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Run `qrt::layernorm` on CUDA tensors."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rows(x, weight, eps, y, centred=True, bias=bias)
    return y


def add_layernorm(
    residual: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    inner: Tensor | None = None, inner_eps: float = 0.0, scale: float = 1.0,
    peers: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run `qrt::add_layernorm` on CUDA tensors."""
    y = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    launch_add(residual, x, weight, eps, y, None, (inner, inner_eps, scale, peers), centred=True, bias=bias)
    return y


def add_layernorm_int8(
    residual: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    inner: Tensor | None = None, inner_eps: float = 0.0, scale: float = 1.0,
    peers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `qrt::add_layernorm_int8` on CUDA tensors."""
    codes = torch.empty(residual.shape, dtype=torch.int8, device=x.device)
    token_scale = torch.empty(residual.shape[0], dtype=torch.float32, device=x.device)
    added = inner, inner_eps, scale, peers
    launch_add(residual, x, weight, eps, codes, token_scale, added, centred=True, bias=bias)
    return codes, token_scale
