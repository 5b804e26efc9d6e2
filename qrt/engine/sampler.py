"""Sampler: which rows of the logits are drawn how; `qrt::sample` draws them.

Greedy, temperature, top-k, top-p. A draw does not depend on what it is batched with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.engine.table import RequestTable
from qrt.kernels.sample import sample as draw

_INF = float("inf")


@dataclass(frozen=True)
class SampleMeta:
    """Which rows of the logits are drawn how; the numbers themselves are in the request table.

    rows          int64 [S]   rows of the request table
    draws         int64 [n]   of the S, those that are drawn at random; None: none
    filtered      int64 [f]   of the n, those with top-k or top-p; None: none
    max_top_k     the largest top-k of the filtered, if all of them have one, else 0
    banned        int64 [2, b]   (row of the S, token) pairs that must not be drawn; None: none
    """

    rows: Tensor
    draws: Tensor | None = None
    filtered: Tensor | None = None
    max_top_k: int = 0
    banned: Tensor | None = None


def sample(logits: Tensor, table: RequestTable, meta: SampleMeta) -> Tensor:
    """`logits` [S, V], in any float dtype, -> tokens int64 [S]. Does not change the logits."""
    if meta.banned is not None:
        lost = torch.full_like(meta.banned[0], -_INF, dtype=logits.dtype)
        logits = logits.index_put((meta.banned[0], meta.banned[1]), lost)
    least = _least(logits, table, meta)
    return draw(logits, meta.rows, table.temperature, table.seed, table.length, least)


def _least(logits: Tensor, table: RequestTable, meta: SampleMeta) -> Tensor | None:
    """The smallest logits / temperature that top-k and top-p keep, fp32 [S]; None: nothing is filtered."""
    if meta.draws is None or meta.filtered is None:
        return None
    picked = meta.draws[meta.filtered]
    rows = meta.rows[picked]
    scaled = logits[picked].float().div_(table.temperature[rows, None])
    kept = least_kept(scaled, table.top_k[rows], table.top_p[rows], meta.max_top_k)
    return kept.new_full(meta.rows.shape, -_INF).index_copy_(0, picked, kept[:, 0])


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
    return ordered.gather(-1, kept - 1)
