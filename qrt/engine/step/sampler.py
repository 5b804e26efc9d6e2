"""Sampler: sample a token from each row of the logits, with `qrt::sample`.

Temperature and seed need nothing but the logits. Custom rows (with adjusted or banned tokens, top-k, top-p or
min-p) are sampled from fp32 copies. A row's token does not depend on the rows it is batched with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.engine.schedule.plan import ANY
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.masks import MaskBuffer
from qrt.engine.step.table import RequestTable
from qrt.kernels.sample import NOT_FINITE
from qrt.kernels.sample import sample as sample_logits
from qrt.kernels.sample.ref import masked, not_finite

_INF = float("inf")
ROWS = 256  # rows that are adjusted or sorted at a time, which bounds the memory of copies


@dataclass(frozen=True)
class SampleMeta:
    """Which rules apply to which of S rows; the rules' numbers are in the request table.

    rows          int64 [S]      rows of the request table
    custom_rows   int64 [c]      which of the S need more than temperature and seed; None: none
    adjusted      int64 [2, a]   (index into custom_rows, entry of Adjustments); None: none
    banned        int64 [3, b]   (index into custom_rows, token, token before it or ANY); None: none
    filtered      int64 [f]      indices into custom_rows of rows with top-k, top-p or min-p; None: none
    max_top_k     largest top-k of the filtered rows if all have one, else 0
    """

    rows: Tensor
    custom_rows: Tensor | None = None
    adjusted: Tensor | None = None
    banned: Tensor | None = None
    filtered: Tensor | None = None
    max_top_k: int = 0


def sample(
    logits: Tensor,
    table: RequestTable,
    adjustments: Adjustments,
    meta: SampleMeta,
    masks: MaskBuffer | None = None,
) -> Tensor:
    """Sample tokens int64 [S] from `logits` [S, V] of any float dtype, which stay unchanged.

    A row with NaN or infinity gets NOT_FINITE.

    The masks of a `MaskBuffer` apply before all other rules.
    """
    own = (None, None) if masks is None else (masks.masks, masks.at[: len(logits)])
    if meta.custom_rows is None:
        return sample_logits(logits, meta.rows, table.temperature, table.seed, table.length, None, *own)
    rows = meta.rows[meta.custom_rows]
    x = logits[meta.custom_rows].float()
    wrong = not_finite(x)
    if masks is not None:
        x = masked(x, masks.masks, masks.at[meta.custom_rows])
    x = _allowed(x, rows, table, adjustments, meta)
    sampled = sample_logits(
        x, rows, table.temperature, table.seed, table.length, _least(x, rows, table, meta)
    )
    sampled = sampled.masked_fill_(wrong, NOT_FINITE)
    if meta.adjusted is not None:
        adjustments.count(meta.adjusted[1], sampled[meta.adjusted[0]].clamp(min=0))
    if len(sampled) == len(logits):
        return sampled  # all rows are custom, in order
    tokens = sample_logits(logits, meta.rows, table.temperature, table.seed, table.length, None, *own)
    return tokens.index_copy_(0, meta.custom_rows, sampled)


def _allowed(
    x: Tensor, rows: Tensor, table: RequestTable, adjustments: Adjustments, meta: SampleMeta
) -> Tensor:
    """Return the logits x fp32 [c, V] of `rows` int64 [c], adjusted, with -inf for banned tokens."""
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
    """Return the smallest logits / temperature that the filters keep, fp32 [c]; None: no filters."""
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
    """Return the smallest logit that top-k and then top-p keep in each row.

    logits       [B, V]
    top_k        [B], 0: off; keeps the k largest logits
    top_p        [B], 1: off; keeps the fewest likeliest of these whose probability reaches p, at least one
                 (Holtzman et al., arXiv:1904.09751)
    max_top_k    largest top_k if every row has one, else 0; with it a partial sort is enough

    Tokens as likely as the last one kept are kept too, so that their order does not matter. Returns fp32
    [B, 1].
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
    most = top_p.masked_fill(top_p >= 1, _INF)  # off: keep even tokens whose rounded sum exceeds 1
    kept = ((before < most[:, None]) & ~beyond).sum(-1, keepdim=True)
    return ordered.gather(-1, kept.clamp_(min=1) - 1)  # keep one even if top_p underflows to 0 in fp32
