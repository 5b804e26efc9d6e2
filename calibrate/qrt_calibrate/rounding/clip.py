"""Weight clipping: shrink a group's range where the finer grid gains more than the extremes lose."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.quant.spec import QuantSpec
from qrt_calibrate.rounding.rtn import round_weight

SHRINKS = tuple(1 - step / 40 for step in range(15))  # 1.00, 0.975, ... 0.65
_BLOCK_ELEMENTS = 1 << 19  # rows are searched in blocks that stay in a CPU's cache
_GPU_BLOCK_ELEMENTS = 1 << 24  # on a GPU blocks only bound temporary memory


def search_clip(weight: Tensor, importance: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Find each group's shrink factor [N, K/G] of least sum of importance * (w - dequantized w)^2.

    weight       [N, K]
    importance   [K]: cost of a squared error in each column, e.g. E[x^2], the diagonal of the Hessian
    dtype        of the stored scale
    """
    elements = _GPU_BLOCK_ELEMENTS if weight.is_cuda else _BLOCK_ELEMENTS
    rows = max(1, elements // weight.shape[1])
    return torch.cat([_search_rows(block, importance, spec, dtype) for block in weight.split(rows)])


def _search_rows(weight: Tensor, importance: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    group = spec.group_of(weight.shape[1])
    best = weight.new_ones(weight.shape[0], weight.shape[1] // group)
    least = torch.full_like(best, torch.inf)
    for shrink in SHRINKS:
        wrong = round_weight(weight, spec, dtype, shrink).dequantize().sub_(weight).square_()
        error = wrong.mul_(importance).unflatten(1, (-1, group)).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, shrink, best)
    return best
