"""The operators of `qrt.kernels.layernorm` in torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from qrt.kernels.rmsnorm.ref import add_normed
from qrt.quant import affine


def layernorm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm of x [..., K], contiguous, in x's dtype."""
    normal = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        normal = normal * weight.float()
    if bias is not None:
        normal = normal + bias.float()
    return normal.to(x.dtype).contiguous()


def add_layernorm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    inner: Tensor | None = None,
    inner_eps: float = 0.0,
    scale: float = 1.0,
    peers: Tensor | None = None,
) -> Tensor:
    """Do `add_normed`, and return the norm of the sum."""
    add_normed(residual, x, inner, inner_eps, scale, peers)
    return layernorm(residual, weight, bias, eps)


def add_layernorm_int8(
    residual: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    inner: Tensor | None = None,
    inner_eps: float = 0.0,
    scale: float = 1.0,
    peers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `add_layernorm` as codes int8 [T, K] and scale fp32 [T]."""
    y = add_layernorm(residual, x, weight, bias, eps, inner, inner_eps, scale, peers)
    codes, token_scale = affine.quantize_tokens(y)
    return codes, token_scale.squeeze(-1)
