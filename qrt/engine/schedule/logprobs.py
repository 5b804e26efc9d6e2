"""Scores: log-probabilities of given tokens, and of the likeliest tokens at the same positions.

They and vectors of models that pool are arrays on the host, so that a server's API processes need no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Vectors = Floats  # [n, D], what a model that pools makes of a prompt


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities at n positions, natural logarithm.

    logprobs       fp32 [n]      of the token that came
    ranks          int64 [n]     its rank by probability, 1 = likeliest (ties share the better rank)
    top_ids        int64 [n, k]  the k likeliest tokens, likeliest first
    top_logprobs   fp32 [n, k]
    """

    logprobs: Floats
    ranks: Ids
    top_ids: Ids
    top_logprobs: Floats

    @classmethod
    def empty(cls) -> LogprobRows:
        """Return scores of no positions."""
        floats, ids = np.empty((0, 0), np.float32), np.empty((0, 0), np.int64)
        return cls(floats.reshape(0), ids.reshape(0), ids, floats)

    def __len__(self) -> int:
        return len(self.logprobs)

    def part(self, start: int, stop: int, num_top: int) -> LogprobRows:
        """Return positions [start, stop) with the `num_top` likeliest tokens of each."""
        rows = slice(start, stop)
        return LogprobRows(
            self.logprobs[rows],
            self.ranks[rows],
            self.top_ids[rows, :num_top],
            self.top_logprobs[rows, :num_top],
        )


def concat(parts: Sequence[LogprobRows]) -> LogprobRows:
    """Join the positions of all parts, in order."""
    return LogprobRows(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )
