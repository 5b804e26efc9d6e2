"""Token embedding: one row of the table per token."""

from __future__ import annotations

from torch import Tensor


class Embedding:
    """The table, weight [V, H] in the model dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [T] int64 -> their rows [T, H], a new tensor."""
        return self.weight[tokens]
