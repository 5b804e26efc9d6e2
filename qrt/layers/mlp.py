"""The gated MLP: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor

from qrt.kernels.silu_mul import silu_mul, silu_mul_int8
from qrt.layers.linear import Linear
from qrt.quant.tokens import QuantizedTokens


class MLP:
    """gate_up stacks gate over up, N = 2I; down reads I."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor | QuantizedTokens) -> Tensor:
        """x [T, H] -> [T, H], or `Linear.shares` of it."""
        if not self.down.int8_tokens:
            return self.down(self.gate_up.silu_mul(x) if isinstance(x, Tensor) else silu_mul(self.gate_up(x)))
        if isinstance(x, QuantizedTokens):
            return self.down.shares(self.gate_up.silu_mul_int8(x))
        y = self.gate_up(x)
        codes, scale = silu_mul_int8(y)
        return self.down.shares(QuantizedTokens(codes, scale, y.dtype))
