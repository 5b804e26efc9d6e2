"""What rounding costs: predictions of the exact and the rounded model on windows that did not calibrate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.model.head import AnyHead
from qrt_calibrate.model.streams import Streams


@dataclass(frozen=True)
class Cost:
    """What rounding costs, over `tokens` predictions. Perplexities are those of the windows' own next tokens.

    kl           mean Kullback-Leibler divergence of the rounded from the exact distribution, in nats
    agreement    share of positions with the same likeliest token in both
    """

    tokens: int
    exact_ppl: float
    ppl: float
    kl: float
    agreement: float


@torch.no_grad()
def measure_cost(
    executor: LayerExecutor, streams: Streams, windows: Tensor, head: AnyHead | None
) -> Cost | None:
    """Measure the cost on the windows of `streams` that do not calibrate; None if there are none.

    `windows` [B, T] are the token ids. The hidden states are those after the last layer; `head` is the
    rounded model's, if it has one of its own.
    """
    first = streams.calibrating
    totals = torch.zeros(4, dtype=torch.float64)  # losses, exact losses, KL, agreements
    places = streams.in_order(first, len(windows))
    for ids, (share, at) in zip(windows[first:], places, strict=True):
        states = ((share.exact[at], None), (share.rounded[at], head))
        p, q = (F.log_softmax(executor.logits(hidden[:-1], by), -1).cpu() for hidden, by in states)
        totals[0] += F.nll_loss(q, ids[1:], reduction="sum")
        totals[1] += F.nll_loss(p, ids[1:], reduction="sum")
        totals[2] += F.kl_div(q, p, reduction="sum", log_target=True)
        totals[3] += (p.argmax(-1) == q.argmax(-1)).sum()
        executor.expect_finite(executor.head_name, totals)
    tokens = (len(windows) - first) * (windows.shape[1] - 1)
    if not tokens:
        return None
    means = totals / tokens
    means[:2].exp_()  # may overflow to infinity, which `Report.files` refuses
    ppl, exact_ppl, kl, agreement = means.tolist()
    return Cost(tokens, exact_ppl, ppl, kl, agreement)
