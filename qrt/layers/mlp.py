"""The mlp: down(act(gate(x)) * up(x)) (GLU variants, Shazeer 2020, arXiv:2002.05202), or down(act(up(x)))."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qrt.kernels.silu_mul import silu_mul
from qrt.layers.activations import XIELU
from qrt.layers.linear import Linear


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
