"""Score given tokens and the likeliest ones, from raw logits without temperature or filters."""

from __future__ import annotations

from torch import Tensor

from qrt.engine.schedule.scores import Scores


def score(logits: Tensor, targets: Tensor, num_top: int) -> Scores:
    """Score `targets` int64 [n] under softmax(`logits` fp32 [n, V]), on the logits' device."""
    total = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    top = logits.topk(num_top, dim=-1)
    return Scores(chosen[:, 0] - total, ranks, top.indices, top.values - total[:, None])
