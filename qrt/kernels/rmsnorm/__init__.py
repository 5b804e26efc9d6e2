"""`rmsnorm`, `add_rmsnorm`: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467).

rmsnorm(x [..., K], weight [K], eps) -> [..., K]     leading dimensions may be strided, as q and k in qkv are
add_rmsnorm(residual [T, K], x [T, K], weight [K], eps) -> [T, K]     residual += x in place, its norm

Sums are fp32; the normalized row is rounded to x's dtype before it is multiplied by the weight, which is
the order of transformers' Llama and Qwen models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.op import define
from qrt.kernels.rmsnorm import ref


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _fake(x, weight, eps)


rmsnorm = define(
    "rmsnorm(Tensor x, Tensor weight, float eps) -> Tensor",
    ref=ref.rmsnorm,
    triton="qrt.kernels.rmsnorm.kernel:rmsnorm",
    fake=_fake,
)

add_rmsnorm = define(
    "add_rmsnorm(Tensor(a!) residual, Tensor x, Tensor weight, float eps) -> Tensor",
    ref=ref.add_rmsnorm,
    triton="qrt.kernels.rmsnorm.kernel:add_rmsnorm",
    fake=_fake_add,
)
