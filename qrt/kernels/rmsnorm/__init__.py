"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467).

rmsnorm(x [..., K], weight [K], eps) -> [..., K]     leading dimensions may be strided, as q and k in qkv are
embed_rmsnorm(ids int64 [T], table [V, K], weight [K], eps, scale=1) -> rows table[ids] * scale [T, K], their
    norm [T, K]
add_normed(residual [T, K], x [T, K], inner [K] | None, inner_eps, scale=1, peers=None):
    residual += scale * x in place, or with the norm of x, by the weight `inner`, in place of x
add_rmsnorm(residual, x, weight [K], eps, inner, inner_eps, scale, peers) -> norm [T, K] of the sum of
    `add_normed`
add_rmsnorm_int8(the same) -> that norm as codes int8 [T, K], scale fp32 [T], by `affine.quantize_tokens`;
    without a weight, the sum itself

x of the last three may also be fp32 [S, T, K]: then its sum over S, rounded to residual's dtype, is added.
With `peers` (qrt.kernels.all_reduce) the sum of all ranks' x is added, in one launch.
The norm of x and its product with scale are rounded to residual's dtype, too.

Sums are fp32. The normalized row is rounded to x's dtype before it is multiplied by the weight, as in
transformers' Llama and Qwen models; an fp32 weight multiplies it before it is rounded, as in its Gemma.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.op import define
from qrt.kernels.rmsnorm import ref


def fake(x: Tensor) -> Tensor:
    """Return the result of a norm, without data."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_embed(ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    rows = table.new_empty(len(ids), table.shape[1])
    return rows, torch.empty_like(rows)


def fake_add(residual: Tensor) -> Tensor:
    """Return the norm of a sum, without data."""
    return fake(residual)


rmsnorm = define(
    ref.rmsnorm,
    triton="qrt.kernels.rmsnorm.kernel:rmsnorm",
    fake=fake,
)

embed_rmsnorm = define(
    ref.embed_rmsnorm,
    triton="qrt.kernels.rmsnorm.kernel:embed_rmsnorm",
    fake=_fake_embed,
)

add_normed = define(
    ref.add_normed,
    triton="qrt.kernels.rmsnorm.kernel:add_normed",
    mutates=["residual"],
)

add_rmsnorm = define(
    ref.add_rmsnorm,
    triton="qrt.kernels.rmsnorm.kernel:add_rmsnorm",
    fake=fake_add,
    mutates=["residual"],
)


def fake_int8(residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a norm and their scale, without data."""
    codes = torch.empty(residual.shape, dtype=torch.int8, device=residual.device)
    return codes, residual.new_empty(residual.shape[0], dtype=torch.float32)


add_rmsnorm_int8 = define(
    ref.add_rmsnorm_int8,
    triton="qrt.kernels.rmsnorm.kernel:add_rmsnorm_int8",
    fake=fake_int8,
    mutates=["residual"],
)
