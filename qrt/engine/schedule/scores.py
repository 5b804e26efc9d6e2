"""Scores: log-probabilities of given tokens, and of the likeliest tokens at the same positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Vectors = Tensor  # fp32 [n, D], what a model that pools makes of a prompt


@dataclass(frozen=True)
class Scores:
    """Log-probabilities at n positions, natural logarithm.

    logprobs       fp32 [n]      of the token that came
    ranks          int64 [n]     its rank by probability, 1 = likeliest (ties share the better rank)
    top_ids        int64 [n, k]  the k likeliest tokens, likeliest first
    top_logprobs   fp32 [n, k]
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @classmethod
    def empty(cls) -> Scores:
        """Return scores of no positions."""
        none, ids = torch.empty(0), torch.empty(0, dtype=torch.int64)
        return cls(none, ids, ids.view(0, 0), none.view(0, 0))

    def __len__(self) -> int:
        return len(self.logprobs)

    def map(self, change: Callable[[Tensor], Tensor]) -> Scores:
        """Return the scores with `change` applied to each tensor."""
        return Scores(
            change(self.logprobs), change(self.ranks), change(self.top_ids), change(self.top_logprobs)
        )

    def part(self, start: int, stop: int, num_top: int) -> Scores:
        """Return positions [start, stop) with the `num_top` likeliest tokens of each."""
        rows = slice(start, stop)
        return Scores(
            self.logprobs[rows],
            self.ranks[rows],
            self.top_ids[rows, :num_top],
            self.top_logprobs[rows, :num_top],
        )


def concat(parts: Sequence[Scores]) -> Scores:
    """Join the positions of all parts, in order."""
    return Scores(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )


def join(parts: Sequence[Vectors]) -> Vectors:
    """Join the vectors of all parts, in order."""
    return torch.cat(list(parts))
