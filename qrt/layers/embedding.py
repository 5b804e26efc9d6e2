"""Token embedding: one row of the table per token, and what some models do to it."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.layers.norm import NormLayer, normed


class Embedding:
    """The table, weight [V, H] in the model dtype.

    scale      what its rows are multiplied by, rounded to the model dtype
    positions  [P, H] learned positions, or None: row p + first is added for position p
    norm       a norm of the sum, or None
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        scale: float = 1.0,
        positions: Tensor | None = None,
        first: int = 0,
        norm: NormLayer | None = None,
    ) -> None:
        self.weight = weight
        self.scale = torch.tensor(scale, dtype=weight.dtype).item()
        self.positions = positions
        self.first = first
        self.norm = norm

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [T] int64, positions [T] -> [T, H], a new tensor."""
        x = self.weight[tokens]
        if self.scale != 1.0:
            x *= self.scale
        if self.positions is not None:
            x += self.positions[positions + self.first]
        return normed(self.norm, x)

    @property
    def scaled_rows(self) -> bool:
        """Whether the rows are multiplied by the scale, and that is all."""
        return self.positions is None and self.norm is None

    def parameters(self) -> list[Tensor]:
        """Every tensor it holds."""
        positions = [] if self.positions is None else [self.positions]
        return [self.weight, *positions, *([] if self.norm is None else self.norm.parameters())]
