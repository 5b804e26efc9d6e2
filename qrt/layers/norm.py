"""RMSNorm, LayerNorm, and how they normalize the heads of q and k."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.layernorm import layernorm
from qrt.kernels.rmsnorm import rmsnorm
from qrt.kernels.tensor_parallel import TensorParallelGroup


class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467); weight [K].

    The normalized row is rounded to x's dtype before the weight multiplies it, unless the weight is fp32.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> the same shape and dtype, a new tensor."""
        return rmsnorm(x, self.weight, self.eps)

    def parameters(self) -> list[Tensor]:
        """Every tensor it holds."""
        return [self.weight]


class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias over the last dimension (Ba et al. 2016, arXiv:1607.06450).

    weight   [K], or [heads, K] for x [..., heads, K]; None: one
    bias     [K], or None
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> the same shape and dtype, a new tensor; computed in fp32."""
        if self.weight is None or self.weight.dim() == 1:
            return layernorm(x, self.weight, self.bias, self.eps)
        normal = layernorm(x.float(), None, None, self.eps) * self.weight.float()
        return (normal if self.bias is None else normal + self.bias.float()).to(x.dtype)

    def parameters(self) -> list[Tensor]:
        """Every tensor it holds."""
        return [tensor for tensor in (self.weight, self.bias) if tensor is not None]


NormLayer = RMSNorm | LayerNorm


class WholeNorm:
    """A norm over all heads of a token at once: x [T, heads, D] as rows of heads * D.

    ranks   how many ranks have as many of its heads each; the norm is then that of all: the mean of x^2 is
            the mean of the ranks' means
    peers   those ranks, or None if this is the only one
    """

    def __init__(self, norm: NormLayer, ranks: int = 1, peers: TensorParallelGroup | None = None) -> None:
        self.norm, self.ranks, self.peers = norm, ranks, peers

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, D] -> the same shape, a new tensor."""
        if self.peers is None:
            return self.norm(x.flatten(1)).view(x.shape)
        assert isinstance(self.norm, RMSNorm), "LayerNorm over the heads of several ranks"
        wide, weight = x.float(), self.norm.weight.view(x.shape[1:])
        mean = self.peers.all_reduce(wide.square().mean((1, 2))[:, None])[..., None] / self.ranks
        normal = wide * torch.rsqrt(mean + self.norm.eps)
        return (normal.to(x.dtype) * weight if weight.dtype == x.dtype else normal * weight).to(x.dtype)

    def parameters(self) -> list[Tensor]:
        """Every tensor it holds."""
        return self.norm.parameters()


def normed(norm: NormLayer | None, x: Tensor) -> Tensor:
    """Return the norm of x, or x where there is no norm."""
    return x if norm is None else norm(x)
