"""Measure how far one model's next-token distributions are from another's, per position and on average.

The figures are those of llama-perplexity's --kl-divergence, with plainer names. All logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0)


@dataclass(frozen=True)
class Positions:
    """Hold n positions in host memory; `base` is the model that is compared with.

    kl           fp64 [n]   KL(base || model) = sum p_base (log p_base - log p_model)
    nll          fp64 [n]   the model's loss on the token that follows in the text
    base_nll     fp64 [n]   base's loss on it
    top          int64 [n]  the model's likeliest token
    base_top     int64 [n]  base's likeliest token
    top_p_flip   bool [n]   the token that follows is in the top-p nucleus of exactly one of the two
    """

    kl: Tensor
    nll: Tensor
    base_nll: Tensor
    top: Tensor
    base_top: Tensor
    top_p_flip: Tensor

    def __len__(self) -> int:
        return len(self.kl)

    def to_json(self) -> dict[str, list[Any]]:
        """Return the columns as lists, without rounding."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}

    @classmethod
    def from_json(cls, columns: Mapping[str, list[Any]]) -> Positions:
        """Read back what `to_json` returned."""
        return cls(*(torch.tensor(columns[field.name], dtype=_dtype(field.name)) for field in fields(cls)))

    @classmethod
    def concat(cls, parts: Sequence[Positions]) -> Positions:
        """Join the positions of all parts, in order."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def _dtype(column: str) -> torch.dtype:
    return {"top": torch.int64, "base_top": torch.int64, "top_p_flip": torch.bool}.get(column, torch.float64)


def compare(base_logits: Tensor, logits: Tensor, targets: Tensor, top_p: float) -> Positions:
    """Compare two models' logits [n, V] at the same n positions, where the tokens int64 [n] follow.

    Everything is float64: the divergence of a good format (1e-6) is far below the precision of a float32 log
    p.
    """
    base, model = base_logits.double().log_softmax(-1), logits.double().log_softmax(-1)
    p = base.exp()
    top, base_top = model.argmax(-1), base.argmax(-1)
    flip = in_nucleus(model, targets, top_p) != in_nucleus(base, targets, top_p)
    nll, base_nll = (-x.gather(-1, targets[:, None])[:, 0] for x in (model, base))
    kl = (p * (base - model)).sum(-1).clamp(min=0.0)  # only rounding makes it negative
    found = (kl, nll, base_nll, top, base_top, flip)
    return Positions(*(column.cpu() for column in found))


def in_nucleus(logp: Tensor, tokens: Tensor, top_p: float) -> Tensor:
    """Return whether `tokens` [n] are in the top-p nucleus of `logp` [n, V].

    A token is in it when all likelier tokens together have a probability below `top_p`.
    """
    likelier = logp > logp.gather(-1, tokens[:, None])
    return logp.exp().masked_fill_(~likelier, 0.0).sum(-1) < top_p


def figures(positions: Positions) -> dict[str, float]:
    """Return means with standard errors over positions, and percentiles.

    kl_*             KL in nats; `kl_se` is the mean's standard error
    ln_ppl_ratio     mean difference of the losses, and `ln_ppl_ratio_se`
    ln_ppl_corr      correlation of the two losses over positions
    top1_agreement   share of positions with the same likeliest token, and `top1_agreement_se`
    top_p_flips      share of positions whose token a top-p sampler could draw from only one of the two models
    dp_*             change in the probability of the token that follows: mean, root mean square, percentiles
    """
    n = len(positions)
    agreement = float((positions.top == positions.base_top).double().mean())
    change = positions.nll - positions.base_nll
    dp = (-positions.nll).exp() - (-positions.base_nll).exp()
    losses = torch.stack((positions.nll, positions.base_nll))
    return {
        "kl_mean": float(positions.kl.mean()),
        "kl_se": _standard_error(positions.kl),
        "kl_max": float(positions.kl.max()),
        "kl_min": float(positions.kl.min()),
        **_percentiles("kl", positions.kl),
        "ln_ppl_ratio": float(change.mean()),
        "ln_ppl_ratio_se": _standard_error(change),
        "ln_ppl_corr": float(torch.corrcoef(losses)[0, 1]) if n > 1 else 1.0,
        "top1_agreement": agreement,
        "top1_agreement_se": (agreement * (1 - agreement) / max(n - 1, 1)) ** 0.5,
        "top_p_flips": float(positions.top_p_flip.double().mean()),
        "dp_mean": float(dp.mean()),
        "dp_rms": float(dp.square().mean().sqrt()),
        **_percentiles("dp", dp),
    }


def _standard_error(values: Tensor) -> float:
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0


def _percentiles(name: str, values: Tensor) -> dict[str, float]:
    ordered = values.sort().values  # torch.quantile takes at most 16 million values
    last = len(ordered) - 1
    return {f"{name}_p{p:g}": _between(ordered, last * p / 100) for p in PERCENTILES}


def _between(ordered: Tensor, place: float) -> float:
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(torch.lerp(ordered[low], ordered[high], place - low))
