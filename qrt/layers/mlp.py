"""The gated MLP: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor

from qrt.kernels.silu_mul import silu_mul
from qrt.layers.linear import Linear


class MLP:
    """gate_up stacks gate over up, N = 2I; down reads I."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.down(silu_mul(self.gate_up(x)))
