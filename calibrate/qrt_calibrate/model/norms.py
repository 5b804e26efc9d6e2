"""The norms of a layer by their definition, with parameters as the checkpoint stores them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qrt.arch import Arch

META = torch.device("meta")  # parameters have no memory until they are loaded


class ReferenceNorm(nn.Module):
    """A norm over the last dimension, of weight `shape`; `channels` reorder its weight as it is used."""

    channels: Tensor | None

    def __init__(self, arch: Arch, *shape: int, bias: bool = False, channels: Tensor | None = None) -> None:
        super().__init__()
        self._spec = arch.norm
        held = arch.norm.kind != "unit"
        self.weight = nn.Parameter(torch.empty(shape, device=META)) if held else None
        self.bias = nn.Parameter(torch.empty(shape, device=META)) if held and bias else None
        self.register_buffer("channels", channels, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> the same shape."""
        spec = self._spec
        if spec.kind == "rms":
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps)
        else:
            x = F.layer_norm(x, x.shape[-1:], eps=spec.eps)
        if self.weight is None:
            return x
        x = x * self._placed(self.weight + spec.plus if spec.plus else self.weight)
        return x if self.bias is None else x + self._placed(self.bias)

    def _placed(self, own: Tensor) -> Tensor:
        return own if self.channels is None else own[..., self.channels]


class _EachNorm(nn.Module):
    """Norms of one head each, in modules of their own."""

    def __init__(self, norms: Sequence[ReferenceNorm]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, heads, D] -> the same shape."""
        parts = zip(self.norms, x.unbind(-2), strict=True)
        return torch.stack([norm(part) for norm, part in parts], -2)


class _WholeNorm(ReferenceNorm):
    """One norm over all heads of a token."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, heads, D] -> the same shape."""
        return super().forward(x.flatten(-2)).view(x.shape)


def head_norm(arch: Arch, heads: int, bias: bool, channels: Tensor | None) -> nn.Module:
    """Return the norm over `heads` heads of q or k."""
    dim = arch.head_dim
    match arch.qk_norm:
        case "modules":
            return _EachNorm([ReferenceNorm(arch, dim, channels=channels) for _ in range(heads)])
        case "each":
            return ReferenceNorm(arch, heads, dim, bias=bias, channels=channels)
        case "whole":
            if channels is not None:
                channels = (torch.arange(heads, device=channels.device)[:, None] * dim + channels).flatten()
            return _WholeNorm(arch, heads * dim, bias=bias, channels=channels)
    return ReferenceNorm(arch, dim, bias=bias, channels=channels)
