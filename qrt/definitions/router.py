"""The router of a mixture: which experts read a token, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

NEVER = float("-inf")
SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # what an expert is judged by
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "top": lambda logits: logits,
}


def best(judged: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest of each row, largest first; of equal ones the lower index."""
    return judged.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def in_best_groups(judged: Tensor, groups: int, kept: int, group_top: int) -> Tensor:
    """Return judged [T, E] with -inf outside the `kept` best groups."""
    grouped = judged.unflatten(-1, (groups, -1))
    worth = grouped.topk(group_top, -1).values.sum(-1)
    is_kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best(worth, kept), True)
    return grouped.masked_fill(~is_kept[..., None], NEVER).flatten(1)


def sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Return the weights of the two best experts, and which they are (Liu et al. 2024, arXiv:2409.12136).

    The weight of one is its softmax over the experts that come close to it: those that fall short of it by no
    more than 2 * jitter of the larger of |logit| and its logit. The second is judged without the first.
    """
    weights, chosen, left = [], [], logits
    for _ in range(2):
        index = best(left, 1)
        top = left.gather(1, index)
        far = (top - logits) / logits.abs().maximum(top) > 2 * jitter
        weights.append(left.masked_fill(far, NEVER).softmax(-1).gather(1, index))
        chosen.append(index)
        left = left.scatter(1, index, NEVER)
    return torch.cat(weights, 1), torch.cat(chosen, 1)


def route(  # noqa: PLR0913 -- the operator's arguments, which are flat
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    top_k: int,
    score: str,
    renormalize: bool,
    factor: float,
    groups: int,
    kept: int,
    group_top: int,
    jitter: float,
) -> tuple[Tensor, Tensor]:
    """Return the weights fp32 [T, k] and the experts int32 [T, k] of tokens x [T, H]."""
    logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if score == "sparsemixer":
        weights, chosen = sparsemixer(logits, jitter)
        return weights * factor, chosen.int()
    scores = SCORES[score](logits)
    judged = logits  # in the order of their scores, but never rounded to equal ones
    if correction is not None or groups > 1:
        judged = scores if correction is None else scores + correction
    if groups > 1:
        judged = in_best_groups(judged, groups, kept, group_top)
    chosen = best(judged, top_k)
    weights = scores.gather(1, chosen)
    if score == "top":
        weights = weights.softmax(-1)
    elif renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * factor, chosen.int()
