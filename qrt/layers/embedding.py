"""Token embedding: one row of the table per token."""

from __future__ import annotations

from torch import Tensor

from qrt.kernels.rmsnorm import embed_rmsnorm
from qrt.layers.norm import RMSNorm


class Embedding:
    """The table, weight [V, H] in the model dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, tokens: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """tokens [T] int64 -> their rows [T, H], a new tensor, and `norm` of them."""
        return embed_rmsnorm(tokens, self.weight, norm.weight, norm.eps)
