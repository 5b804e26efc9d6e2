"""The operators of `qrt.kernels.layernorm` on the GPU, by the kernel of `rmsnorm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qrt.kernels.layernorm import ref
from qrt.kernels.op import takes
from qrt.kernels.rmsnorm.kernel import launch_add, launch_rows


def layernorm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Run `qrt::layernorm` on CUDA tensors."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rows(x, weight, eps, y, centred=True, bias=bias)
    return y


@takes(ref.add_layernorm)
def add_layernorm(a: Any) -> Tensor:
    """Run `qrt::add_layernorm` on CUDA tensors."""
    y = torch.empty(a.residual.shape, dtype=a.residual.dtype, device=a.x.device)
    launch_add(
        a.residual,
        a.x,
        a.weight,
        a.eps,
        y,
        None,
        (a.inner, a.inner_eps, a.scale, a.peers),
        centred=True,
        bias=a.bias,
    )
    return y


@takes(ref.add_layernorm_int8)
def add_layernorm_int8(a: Any) -> tuple[Tensor, Tensor]:
    """Run `qrt::add_layernorm_int8` on CUDA tensors."""
    codes = torch.empty(a.residual.shape, dtype=torch.int8, device=a.x.device)
    token_scale = torch.empty(a.residual.shape[0], dtype=torch.float32, device=a.x.device)
    added = a.inner, a.inner_eps, a.scale, a.peers
    launch_add(a.residual, a.x, a.weight, a.eps, codes, token_scale, added, centred=True, bias=a.bias)
    return codes, token_scale
