"""Counters of a router, by which the last program to add sums of its splits knows that it is the last."""

from __future__ import annotations

import torch
from torch import Tensor

COUNTERS = 132  # most blocks of tokens whose sums are split


def counters_of(weight: Tensor) -> Tensor:
    """Return the counters int32 [COUNTERS] of a router weight [E, H]: 0 between calls, and its own.

    They stay with the tensor, so that two streams with different layers do not meet in them. Layers ask for
    them when they are made. Those made while a graph is recorded are zeroed by that graph alone, so they do
    not stay.
    """
    kept: Tensor | None = getattr(weight, "qrt_arrivals", None)
    if kept is None:
        kept = torch.zeros(COUNTERS, dtype=torch.int32, device=weight.device)
        if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            weight.qrt_arrivals = kept  # type: ignore[attr-defined]
    return kept
