"""Score given tokens and the likeliest ones, from raw logits without temperature or filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qrt.engine.schedule.logprobs import LogprobRows


class ScoreTensors(NamedTuple):
    """The arrays of a `LogprobRows` as tensors."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def on_host(self) -> LogprobRows:
        """Return the Scores; the tensors are on the host, and share its memory."""
        return LogprobRows(*(tensor.numpy() for tensor in self))


def score(logits: Tensor, targets: Tensor, num_top: int) -> ScoreTensors:
    """Score `targets` int64 [n] under softmax(`logits` fp32 [n, V]), on the logits' device.

    The log-probabilities of a row with NaN or infinity, or with no larger logit than -inf, are NaN.
    """
    total = logits.logsumexp(-1)
    total = total.masked_fill(~total.isfinite(), torch.nan)
    chosen = logits.gather(-1, targets[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    top = logits.topk(num_top, dim=-1)
    return ScoreTensors(chosen[:, 0] - total, ranks, top.indices, top.values - total[:, None])


def joined(parts: Sequence[ScoreTensors], take: Callable[[Tensor], Tensor]) -> ScoreTensors:
    """Join the positions of all parts, in order, and return what `take` makes of each tensor."""
    return ScoreTensors(*(take(torch.cat(tensors)) for tensors in zip(*parts, strict=True)))
