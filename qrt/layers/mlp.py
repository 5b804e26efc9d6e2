"""The mlp: down(act(gate(x)) * up(x)) (GLU variants, Shazeer 2020, arXiv:2002.05202), or down(act(up(x)))."""

from __future__ import annotations

from torch import Tensor

from qrt.definitions.activations import XIELU
from qrt.kernels.act_mul import act_mul
from qrt.layers.linear import Linear


class MLP:
    """An mlp of two products.

    gate_up  stacks gate over up, N = 2I; if not gated it is up alone, N = I
    down     reads I
    act      what is computed of each element, by its name in Arch
    """

    def __init__(self, gate_up: Linear, down: Linear, act: str = "silu", *, gated: bool = True) -> None:
        self.gate_up = gate_up
        self.down = down
        self.act = act
        self.gated = gated

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.down(self.inside(self.gate_up(x)))

    def inside(self, x: Tensor) -> Tensor:
        """Return what `down` reads, of what `gate_up` computes: [T, N] -> [T, I]."""
        return act_mul(x, self.act, self.gated)

    @property
    def dense(self) -> MLP:
        """The mlp that all tokens go through: itself."""
        return self

    def linears(self) -> tuple[Linear, ...]:
        """Both products."""
        return self.gate_up, self.down

    def parameters(self) -> list[Tensor]:
        """Every tensor outside its Linears."""
        return []


class XIELUMLP(MLP):
    """An mlp whose activation has weights of its own."""

    def __init__(self, gate_up: Linear, down: Linear, xielu: XIELU, *, gated: bool) -> None:
        super().__init__(gate_up, down, "xielu", gated=gated)
        self.xielu = xielu

    def inside(self, x: Tensor) -> Tensor:
        """Return what `down` reads, of what `gate_up` computes: [T, N] -> [T, I]."""
        if not self.gated:
            return self.xielu(x)
        gate, up = x.chunk(2, -1)
        return self.xielu(gate) * up

    def parameters(self) -> list[Tensor]:
        """Every tensor outside its Linears."""
        return self.xielu.parameters()
