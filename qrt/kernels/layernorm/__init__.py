"""LayerNorm: (x - mean(x)) / std(x) * weight + bias (Ba et al. 2016, arXiv:1607.06450).

layernorm(x [..., K], weight [K] | None, bias [K] | None, eps) -> [..., K]
    leading dimensions may be strided, as q and k in qkv are
add_layernorm(residual [T, K], x [T, K], weight, bias, eps, inner, inner_eps, scale) -> norm [T, K] of the sum
    of `rmsnorm.add_normed`, which changes residual in place; x may be split sums, too
add_layernorm_int8(the same) -> that norm as codes int8 [T, K], scale fp32 [T], by `affine.quantize_tokens`

All is fp32 before the one rounding to x's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.layernorm import ref
from qrt.kernels.op import define


def _fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_add(residual: Tensor) -> Tensor:
    return _fake(residual)


def _fake_int8(residual: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(residual.shape, dtype=torch.int8, device=residual.device)
    return codes, residual.new_empty(residual.shape[0], dtype=torch.float32)


layernorm = define(
    ref.layernorm,
    triton="qrt.kernels.layernorm.kernel:layernorm",
    fake=_fake,
)

add_layernorm = define(
    ref.add_layernorm,
    triton="qrt.kernels.layernorm.kernel:add_layernorm",
    fake=_fake_add,
    mutates=["residual"],
)

add_layernorm_int8 = define(
    ref.add_layernorm_int8,
    triton="qrt.kernels.layernorm.kernel:add_layernorm_int8",
    fake=_fake_int8,
    mutates=["residual"],
)
