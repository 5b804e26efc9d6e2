"""What an mlp computes of each element, by definition."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# by their names in Arch.act; xielu has weights of its own
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """Return gpt-oss's (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within 7; rounded once."""
    gate, wide = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
    return ((wide + 1) * gate * torch.sigmoid(1.702 * gate)).to(up.dtype)


# activations of a gate and its up together
PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu_oai": swiglu_oai}


def act_times(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """Return act(gate) * up, or what a pair function `act` makes of both."""
    return PAIRS[act](gate, up) if act in PAIRS else ACTIVATIONS[act](gate) * up


class XIELU:
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010), with weights of its own.

    p x^2 + b x for x > 0, else n (exp(min(x, eps)) - 1 - x) + b x, where p = softplus(alpha_p) and
    n = b + softplus(alpha_n). alpha_p, alpha_n, beta and eps are tensors of one element.
    """

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> None:
        self.alpha_p, self.alpha_n, self.beta, self.eps = alpha_p, alpha_n, beta, eps

    def __call__(self, x: Tensor) -> Tensor:
        """Of each element, in x's dtype."""
        p, n = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        negative = (torch.expm1(torch.minimum(x, self.eps)) - x) * n + self.beta * x
        return torch.where(x > 0, p * x * x + self.beta * x, negative)

    def parameters(self) -> list[Tensor]:
        """Every tensor it holds."""
        return [self.alpha_p, self.alpha_n, self.beta, self.eps]
