"""Sampler: logits to tokens. Greedy, temperature, top-k, top-p; random draws that do not depend on the batch.

A draw is Gumbel-max: argmax(logits / temperature + g), g = -log(-log u) independent per token, which has the
distribution softmax(logits / temperature) (Gumbel 1954; Maddison et al., arXiv:1411.0030). u is a hash of
(seed, position, token id), not the output of a generator with state: a seeded request gets the same noise
whatever it is batched with, on CPU and GPU, resumed after a pause or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.engine.table import RequestTable

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
    """`logits` fp32 [S, V] -> tokens int64 [S]. Does not change the logits."""
    if meta.banned is not None:
        lost = torch.full_like(meta.banned[0], -_INF, dtype=logits.dtype)
        logits = logits.index_put((meta.banned[0], meta.banned[1]), lost)
    tokens = logits.argmax(-1)
    if meta.draws is not None:
        rows = meta.rows[meta.draws]
        scaled = logits[meta.draws].div_(table.temperature[rows, None])
        if meta.filtered is not None:
            picked = rows[meta.filtered]
            part = scaled[meta.filtered]
            least = least_kept(part, table.top_k[picked], table.top_p[picked], meta.max_top_k)
            scaled[meta.filtered] = part.masked_fill_(part < least, -_INF)
        scaled += gumbel(table.seed[rows], table.length[rows], logits.shape[-1])
        tokens[meta.draws] = scaled.argmax(-1)
    return tokens


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


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise fp32 [B, vocab] for `seed` int64 [B] and `position` int [B]."""
    noise = uniform(seed, position, vocab)
    return noise.neg_().log1p_().neg_().log_().neg_()


def uniform(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Uniform noise fp32 [B, vocab] in (0, 1), bit for bit the same everywhere.

    Near 0 it comes in steps of 2^-31: -log(1 - u) is the arrival time of an exponential race, in which an
    improbable token wins by a very small u.
    """
    key = _mix64(_mix64(seed) ^ position.long())
    low, high = key.int()[:, None], (key >> 32).int()[:, None]
    token = torch.arange(vocab, dtype=torch.int32, device=seed.device)
    bits = _mix32(_mix32(token ^ low) ^ high)
    return bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def _mix64(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele et al. 2014), int64 with wrap-around."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    x = (x ^ _shift(x, 30, 64)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27, 64)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift(x, 31, 64)


def _mix32(x: Tensor) -> Tensor:
    """A 32-bit finalizer of low bias (C. Wellons, hash-prospector), int32 with wrap-around; in place."""
    x ^= _shift(x, 16, 32)
    x *= 0x7FEB352D
    x ^= _shift(x, 15, 32)
    x *= -0x7B935975  # 0x846CA68B
    x ^= _shift(x, 16, 32)
    return x


def _shift(x: Tensor, by: int, bits: int) -> Tensor:
    """Logical shift right: torch's is arithmetic."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)
