"""Weight clipping: shrink a group's range when the finer grid is worth more than the clipped extremes."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.quant.spec import QuantSpec
from qrt_calibrate.rtn import round_weight

SHRINKS = tuple(1 - step / 40 for step in range(15))  # 1.00, 0.975, ... 0.65
_BLOCK_ELEMENTS = 1 << 24  # rows are independent: searched in blocks, to bound the temporaries


def search_clip(weight: Tensor, moment: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The shrink factor [N, K/G] of each group with the least output error E[(x . (w - dequantized w))^2].

    weight   [N, K]
    moment   [K/G, G, G] = E[x x^T] inside each group of inputs
    dtype    of the stored scale

    The mean squared error that a group alone brings into an output, as AWQ's clipping search has it, but from
    the second moment of all calibration tokens instead of a sample of them.
    """
    rows = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    return torch.cat([_search_rows(block, moment, spec, dtype) for block in weight.split(rows)])


def _search_rows(weight: Tensor, moment: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    best = weight.new_ones(weight.shape[0], moment.shape[0])
    least = torch.full_like(best, torch.inf)
    for shrink in SHRINKS:
        wrong = round_weight(weight, spec, dtype, shrink).dequantize() - weight
        groups = wrong.unflatten(1, moment.shape[:2]).transpose(0, 1)
        error = ((groups @ moment) * groups).sum(-1).T
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, shrink, best)
    return best
