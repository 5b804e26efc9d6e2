"""What is trained: the codes and scales of a Linear, and the weight of a norm, each with Adam's moments."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qrt.quant.weight import WeightData

CODE_RATE, SCALE_RATE = 1e-2, 1e-3  # largest steps: in codes, and relative to a scale or a norm's weight
BETAS = (0.9, 0.95)


def is_tuned_norm(name: str) -> bool:
    """Whether a tensor of a layer is a norm that is trained with the Linears."""
    return name.endswith("norm.weight")


@dataclass(frozen=True)
class Tuned:
    """The result of training; names are full.

    linears             trained Linears, without biases
    norms               trained norms
    kl_first, kl_last   mean KL per token of the drawn text, in nats, over the first and last tenth of steps
    """

    linears: dict[str, WeightData]
    norms: dict[str, Tensor]
    kl_first: float
    kl_last: float


class TunedWeight:
    """A Linear's weight in training.

    codes   [N, K] fp32: its codes before they are rounded
    gain    [N, K/G] fp32: factors of its scales, applied before these are rounded to their dtype
    """

    def __init__(self, data: WeightData, dtype: torch.dtype, device: torch.device) -> None:
        assert data.scale is not None
        self._data = replace(data, scale=data.scale.to(device), zero=_moved(data.zero, device), bias=None)
        self.codes = data.values.to(device, torch.float32)
        self.gain = torch.ones(data.scale.shape, device=device)
        self._moments = [
            torch.zeros(2, *own.shape, dtype=dtype, device=device) for own in (self.codes, self.gain)
        ]

    def data(self) -> WeightData:
        """Return the weight as it would be stored now."""
        scale = self._data.scale
        assert scale is not None
        stored = (scale.float() * self.gain).to(scale.dtype)
        return replace(self._data, values=self.codes.round().to(torch.uint8), scale=stored)

    def follow(self, gradient: Tensor, step: int, rate: float) -> None:
        """Take Adam's step number `step`, counted from 1, at `rate` times the largest step.

        `gradient` [N, K] is the gradient of the loss at the weight.
        """
        data = self.data()
        assert data.scale is not None
        groups = gradient.float().unflatten(1, (data.scale.shape[1], -1))
        scale = data.scale.float()[..., None]
        steps = data.dequantize().view(groups.shape) / scale
        gains = (groups * steps).sum(-1) * scale[..., 0]
        pulls = ((self.codes, (groups * scale).flatten(1), CODE_RATE), (self.gain, gains, SCALE_RATE))
        for moments, (own, pull, largest) in zip(self._moments, pulls, strict=True):
            own.sub_(_adam(moments, pull, step), alpha=rate * largest)
        self.codes.clamp_(0, (1 << data.bits) - 1)
        self.gain.clamp_(0.5, 2.0)  # training stays far inside these bounds; scales stay positive


class TunedNorm:
    """A norm's weight in training.

    gain   [K] fp32: factors of the weight, applied before it is rounded to its dtype
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = weight.to(device)
        self.gain = torch.ones(weight.shape, device=device)
        self._moments = torch.zeros(2, *weight.shape, dtype=dtype, device=device)

    def data(self) -> Tensor:
        """Return the weight as it would be stored now."""
        return (self._weight.float() * self.gain).to(self._weight.dtype)

    def follow(self, gradient: Tensor, step: int, rate: float) -> None:
        """Take a step as `TunedWeight.follow` does; `gradient` is [K]."""
        pull = gradient.float() * self._weight.float()
        self.gain.sub_(_adam(self._moments, pull, step), alpha=rate * SCALE_RATE)


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _adam(moments: Tensor, gradient: Tensor, step: int) -> Tensor:
    """Update `moments` [2, ...] and return Adam's direction (arXiv:1412.6980)."""
    found = []
    for own, value, beta in zip(moments, (gradient, gradient.square()), BETAS, strict=True):
        own.copy_(own.float().lerp_(value, 1 - beta))
        found.append(own.float() / (1 - beta**step))
    return found[0] / found[1].sqrt_().add_(1e-12)
