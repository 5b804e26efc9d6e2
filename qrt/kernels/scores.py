"""How a layer weighs the tokens that a query attends: the rule, and what it does to scores, in torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)  # kernels keep scores in base 2


@dataclass(frozen=True)
class Scores:
    """How a layer weighs the tokens that its queries attend.

    scale      of q k^T
    window     tokens that a query attends, itself included; 0: all
    plan       the index of `window` in `DecodeMeta.parts`
    softcap    c of c * tanh(score / c), on scaled scores; 0: none
    slopes     fp32 [Hq]: what each head's scores lose for each token of distance (ALiBi), or None
    """

    scale: float
    window: int = 0
    plan: int = 0
    softcap: float = 0.0
    slopes: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether all tokens are weighed by the scale alone."""
        return not self.window and not self.softcap and self.slopes is None


def weigh(scores: Tensor, distance: Tensor, window: int, softcap: float, slopes: Tensor | None) -> Tensor:
    """Return scaled scores [..., L] as softmax takes them: capped, biased, and -inf where not seen.

    distance   how many tokens each token is before the query, of a shape that fits `scores`
    slopes     of each head, of a shape that fits `scores`, or None
    """
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes * distance
    hidden = distance < 0
    if window:
        hidden = hidden | (distance >= window)
    return scores.masked_fill(hidden, -torch.inf)
