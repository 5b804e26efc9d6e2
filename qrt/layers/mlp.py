"""The mlp: down(act(gate(x)) * up(x)) (GLU variants, Shazeer 2020, arXiv:2002.05202), or down(act(up(x)))."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qrt.kernels.silu_mul import silu_mul
from qrt.layers.linear import Linear

# by their names in Arch.act; xielu has weights of its own
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class MLP:
    """The gated mlp with silu (SwiGLU): gate_up stacks gate over up, N = 2I; down reads I."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.down(self.inside(self.gate_up(x)))

    def inside(self, x: Tensor) -> Tensor:
        """Return what `down` reads, of what `gate_up` computes: [T, N] -> [T, I]."""
        return silu_mul(x)

    def parameters(self) -> list[Tensor]:
        """Every tensor outside its Linears."""
        return []


class OtherMLP(MLP):
    """An mlp with another activation than silu, or without a gate.

    gate_up  stacks gate over up, N = 2I; without a gate it is up alone, N = I
    act      what is computed of each element
    """

    def __init__(
        self, gate_up: Linear, down: Linear, act: Callable[[Tensor], Tensor], *, gated: bool
    ) -> None:
        super().__init__(gate_up, down)
        self.act = act
        self.gated = gated

    def inside(self, x: Tensor) -> Tensor:
        """Return what `down` reads, of what `gate_up` computes: [T, N] -> [T, I]."""
        if not self.gated:
            return self.act(x)
        gate, up = x.chunk(2, -1)
        return self.act(gate) * up

    def parameters(self) -> list[Tensor]:
        """Every tensor outside its Linears."""
        return self.act.parameters() if isinstance(self.act, XIELU) else []


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
