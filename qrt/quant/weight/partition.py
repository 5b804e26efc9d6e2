"""Cut a weight along its inputs: exactly, also where its groups are out of order or parted by the cut."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from qrt.quant.spec import Codes
from qrt.quant.weight.base import WeightData

RUN = 32  # codes of a group are padded to a multiple of this, the least that kernels run


def inputs(weight: WeightData, first: int, last: int) -> WeightData:
    """Return the part of `weight` that multiplies inputs first..last-1, which it counts from 0.

    Codes stay in the order of their groups. A group of which some inputs are in the part is padded to whole
    runs with codes that stand for 0, and `perm` then names an input for each, so it may be longer than
    last - first. Scales are repeated where the groups become smaller. Where no code is out of order or padded
    there is no `perm`.
    """
    if weight.scale is None:
        return replace(weight, values=weight.values[:, first:last].contiguous())
    groups = weight.scale.shape[1]
    order = torch.arange(weight.in_features) if weight.perm is None else weight.perm
    kept = ((order >= first) & (order < last)).view(groups, -1)
    counts = kept.sum(1)
    lengths = counts if groups == 1 else -(-counts // RUN) * RUN
    size = gcd(*lengths.tolist())
    take = _places(kept, lengths)
    group_of = torch.arange(groups).repeat_interleave(lengths)
    padding = take < 0
    take = take.clamp(min=0)
    values, runs = weight.values[:, take], group_of[::size]
    values[:, padding] = _nothing(weight)[:, group_of[padding]]
    perm = (order[take] - first).masked_fill(padding, 0)
    return replace(
        weight,
        values=values,
        scale=weight.scale[:, runs].contiguous(),
        zero=None if weight.zero is None else weight.zero[:, runs].contiguous(),
        perm=None if torch.equal(perm, torch.arange(last - first)) else perm,
    )


def _places(kept: Tensor, lengths: Tensor) -> Tensor:
    """Return the column that goes to each place, int64, -1 for padding.

    kept      bool [groups, G], the columns that have a place, in front of those of their group
    lengths   int64 [groups], the places of each group
    """
    begins = lengths.cumsum(0) - lengths
    at = begins[:, None] + kept.cumsum(1) - 1
    places = torch.full((int(lengths.sum()),), -1)
    places[at[kept]] = kept.flatten().nonzero().flatten()
    return places


def _nothing(weight: WeightData) -> Tensor:
    """Return the code that stands for 0 in each group, uint8 [N or 1, groups]."""
    if weight.zero is not None:
        return weight.zero
    assert weight.scale is not None
    code = 0 if weight.codes is Codes.E2M1 else 1 << (weight.bits - 1)
    return torch.full((1, weight.scale.shape[1]), code, dtype=torch.uint8)
