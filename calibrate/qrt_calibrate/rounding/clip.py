"""Weight clipping: shrink a group's range where the finer grid gains more than the extremes lose."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.quant.affine import choose_qparams, dequantize, quantize
from qrt.quant.spec import QuantSpec

SHRINKS = tuple(1 - step / 40 for step in range(15))  # 1.00, 0.975, ... 0.65
_BLOCK_ELEMENTS = 1 << 19  # rows are searched in blocks that stay in a CPU's cache
_GPU_BLOCK_ELEMENTS = 1 << 24  # on a GPU blocks only bound temporary memory


def search_clip(weight: Tensor, importance: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Find each group's shrink factor [..., N, K/G] of least sum of importance * (w - dequantized w)^2.

    weight       [N, K], or several, [E, N, K]
    importance   [K], or [E, K]: cost of a squared error in each column, e.g. E[x^2], the Hessian's diagonal
    dtype        of the stored scale
    """
    if weight.dim() == 2:
        return search_clip(weight[None], importance[None], spec, dtype)[0]
    elements = _GPU_BLOCK_ELEMENTS if weight.is_cuda else _BLOCK_ELEMENTS
    each, rows = max(1, elements // weight[0].numel()), max(1, elements // weight.shape[2])
    found = []
    for some, cost in zip(weight.split(each), importance.split(each), strict=True):
        blocks = [_search_rows(block, cost[:, None], spec, dtype) for block in some.split(rows, 1)]
        found.append(torch.cat(blocks, 1))
    return torch.cat(found)


def _search_rows(weight: Tensor, importance: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    group = spec.group_of(weight.shape[-1])
    best = weight.new_ones(*weight.shape[:-1], weight.shape[-1] // group)
    least = torch.full_like(best, torch.inf)
    for shrink in SHRINKS:
        scale, zero = choose_qparams(weight, spec, dtype, shrink)
        rounded = dequantize(quantize(weight, scale, zero, spec), scale, zero, spec.bits)
        wrong = rounded.sub_(weight).square_()
        error = wrong.mul_(importance).unflatten(-1, (-1, group)).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, shrink, best)
    return best
