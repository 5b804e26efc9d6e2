"""GPTQ of several weights of one shape at once, each along a factor of its own: the experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.quant.spec import QuantSpec
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.gptq import CACHED_ROWS, block_width, round_block


def round_each(
    weights: Tensor, factors: Sequence[Factor], scale: Tensor, zero: Tensor | None, spec: QuantSpec
) -> Tensor:
    """Round `weights` [E, N, K] to the grids of `scale` and `zero` [E, N, K/G]: codes uint8 [E, N, K].

    Each weight gets the codes that `gptq.round_columns` gives it alone.
    """
    step = len(weights) if weights.is_cuda else max(1, CACHED_ROWS // weights.shape[1])
    codes = torch.empty(weights.shape, dtype=torch.uint8, device=weights.device)
    for begin in range(0, len(weights), step):
        some = slice(begin, begin + step)
        zeros = None if zero is None else zero[some]
        _round(codes[some], weights[some], factors[some], scale[some], zeros, spec)
    return codes


def _round(
    codes: Tensor,
    weights: Tensor,
    factors: Sequence[Factor],
    scale: Tensor,
    zero: Tensor | None,
    spec: QuantSpec,
) -> None:
    """Round a part of the weights of `round_each` into `codes`."""
    count, n, k = weights.shape
    width, number = block_width(weights), torch.arange(count, device=weights.device)[:, None]
    groups = torch.stack([factor.order for factor in factors]) // (k // scale.shape[2])
    scales = scale.float().transpose(1, 2)
    zeros = None if zero is None else zero.float().transpose(1, 2)
    target = weights.new_empty(count, k, n)
    for own, weight, factor in zip(target, weights, factors, strict=True):
        own.copy_(weight[:, factor.order].T)
    errors = torch.empty_like(target)
    for begin in range(0, k, width):
        span = slice(begin, begin + width)
        block = target[:, span].clone()
        if begin:
            before = torch.stack([factor.upper[:begin, span] for factor in factors])
            block.baddbmm_(before.mT, errors[:, :begin], alpha=-1)
        at = groups[:, span]
        offset: Tensor | int = spec.midpoint if zeros is None else zeros[number, at]
        upper = torch.stack([factor.upper[span, span] for factor in factors])
        found, errors[:, span] = round_block(block, scales[number, at], offset, upper, spec)
        for own, factor, values in zip(codes, factors, found, strict=True):
            own[:, factor.order[span]] = values.T.to(torch.uint8)
