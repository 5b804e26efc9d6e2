"""Sampler: which rows of the logits are drawn how; `qrt::sample` draws them.

Greedy, temperature and seed need nothing but the logits. Rows that ask for more (adjusted or banned tokens,
top-k, top-p, min-p) are drawn on their own, from fp32 copies. A draw does not depend on what it is batched
with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.engine.schedule.plan import ANY
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.table import RequestTable
from qrt.kernels.sample import sample as sample_logits

_INF = float("inf")
ROWS = 256  # adjusted, or sorted, at a time: bounds the memory of copies


@dataclass(frozen=True)
class SampleMeta:
    """Which rows of the logits are drawn how; the numbers themselves are in the request table.

    rows          int64 [S]      rows of the request table
    custom_rows       int64 [c]      of the S, those that ask for more than temperature and seed; None: none
    adjusted      int64 [2, a]   (row of the c, entry of Adjustments); None: none
    banned        int64 [3, b]   (row of the c, token, token that must come before it or ANY); None: none
    filtered      int64 [f]      of the c, those drawn from what top-k, top-p or min-p leave; None: none
    max_top_k     the largest top-k of the filtered, if all of them have one, else 0
    """

    rows: Tensor
    custom_rows: Tensor | None = None
    adjusted: Tensor | None = None
    banned: Tensor | None = None
    filtered: Tensor | None = None
    max_top_k: int = 0


def sample(logits: Tensor, table: RequestTable, adjustments: Adjustments, meta: SampleMeta) -> Tensor:
    """`logits` [S, V], in any float dtype, -> tokens int64 [S]. Does not change the logits."""
    if meta.custom_rows is None:
        return sample_logits(logits, meta.rows, table.temperature, table.seed, table.length, None)
    rows = meta.rows[meta.custom_rows]
    x = _allowed(logits[meta.custom_rows].float(), rows, table, adjustments, meta)
    drawn = sample_logits(x, rows, table.temperature, table.seed, table.length, _least(x, rows, table, meta))
    if meta.adjusted is not None:
        adjustments.count(meta.adjusted[1], drawn[meta.adjusted[0]])
    if len(drawn) == len(logits):
        return drawn  # `custom_rows` is in order
    tokens = sample_logits(logits, meta.rows, table.temperature, table.seed, table.length, None)
    return tokens.index_copy_(0, meta.custom_rows, drawn)


def _allowed(
    x: Tensor, rows: Tensor, table: RequestTable, adjustments: Adjustments, meta: SampleMeta
) -> Tensor:
    """The logits x fp32 [c, V] of `rows` int64 [c], adjusted, with -inf for banned tokens."""
    if meta.adjusted is not None:
        for index, places in zip(*(part.split(ROWS) for part in meta.adjusted), strict=True):
            x[index] = adjustments.apply(x[index], places, table.length[rows[index]])
    if meta.banned is not None:
        index, token, after = meta.banned
        applies = (after == ANY) | (table.last_token[rows[index]] == after)
        lost = torch.zeros_like(after, dtype=x.dtype).masked_fill_(applies, -_INF)
        x.index_put_((index, token), lost, accumulate=True)  # a token may be banned twice
    return x


def _least(x: Tensor, rows: Tensor, table: RequestTable, meta: SampleMeta) -> Tensor | None:
    """The smallest logits / temperature that the filters keep, fp32 [c]; None: nothing is filtered."""
    if meta.filtered is None:
        return None
    least = x.new_full(x.shape[:1], -_INF)
    for some in meta.filtered.split(ROWS):
        own = rows[some]
        scaled = x[some].div_(table.temperature[own, None])
        likely = scaled.amax(-1, keepdim=True) + table.min_p[own, None].log()  # -inf where min-p is off
        scaled.masked_fill_(scaled < likely, -_INF)
        kept = least_kept(scaled, table.top_k[own], table.top_p[own], meta.max_top_k)
        least.index_copy_(0, some, torch.maximum(kept, likely)[:, 0])
    return least


def least_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int = 0) -> Tensor:
    """The smallest logit that top-k, then top-p, keep: fp32 [B, 1] of `logits` [B, V], top_k and top_p [B].

    Top-k keeps the k largest; top-p, of their softmax, the fewest likeliest whose probability reaches p
    (Holtzman et al., arXiv:1904.09751), at least one. Tokens as likely as the last one kept are kept too, so
    that the choice does not depend on their order. `max_top_k` is the largest top_k where every row has one
    (0: some row has none): then a partial sort is enough.
    """
    vocab = logits.shape[-1]
    if max_top_k:
        ordered = logits.topk(min(max_top_k, vocab), dim=-1).values
    else:
        ordered = logits.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, vocab)[:, None]
    beyond = torch.arange(ordered.shape[-1], device=logits.device) >= last
    probability = ordered.masked_fill(beyond, -_INF).softmax(-1)
    before = probability.cumsum(-1) - probability
    most = top_p.masked_fill(top_p >= 1, _INF)  # off: not even what rounding puts beyond 1 is cut
    kept = ((before < most[:, None]) & ~beyond).sum(-1, keepdim=True)
    return ordered.gather(-1, kept.clamp_(min=1) - 1)  # fp32 knows no top_p below 1e-45
