"""How a layer weighs the tokens that a query attends: the rule, and what it does to scores, in torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)  # kernels keep scores in base 2


@dataclass(frozen=True)
class AttentionRule:
    """How a layer weighs the tokens that its queries attend.

    scale      of q k^T
    window     tokens that a query attends, itself included; 0: all
    plan       the index of `window` and `segment` in `DecodeMeta.parts`
    softcap    c of c * tanh(score / c), on scaled scores; 0: none
    slopes     fp32 [Hq]: what each head's scores lose for each token of distance (ALiBi), or None
    sinks      fp32 [Hq]: a score of each head that joins the softmax and has no value (gpt-oss), or None
    segment    a query attends no token before the last multiple of this (Llama 4); 0: all
    """

    scale: float
    window: int = 0
    plan: int = 0
    softcap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    segment: int = 0

    def first(self, query: Tensor) -> Tensor:
        """Return the first token that queries at these positions attend; below 0 it is 0."""
        if self.segment:
            return query // self.segment * self.segment
        return query - self.window + 1 if self.window else torch.zeros_like(query)

    @property
    def relative(self) -> bool:
        """Whether nothing changes if all scores of a query move by the same amount."""
        return not self.softcap and self.sinks is None


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of scores [..., L] among themselves and the sink, of a shape that fits [...]."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sink = sinks.expand(scores.shape[:-1])[..., None]
    return torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]


def weigh(scores: Tensor, query: Tensor, token: Tensor, rule: AttentionRule, slopes: Tensor | None) -> Tensor:
    """Return scaled scores [..., L] as softmax takes them: capped, biased, and -inf where not seen.

    query, token   the positions of both, of shapes that fit `scores`
    slopes         of each head, of a shape that fits `scores`, or None
    """
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if slopes is not None:
        scores = scores - slopes * (query - token)
    return scores.masked_fill((token > query) | (token < rule.first(query)), -torch.inf)
