"""GPTQ (arXiv:2210.17323): round column by column, each error made good by the columns still to come.

Columns go by descending diagonal of the Hessian ("static" activation order): scales and zeros are chosen
before, groups stay where they are, and nothing of the order is left in the file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.quant import affine
from qrt.quant.spec import QuantSpec
from qrt.quant.weight import WeightData

BLOCK = 128  # columns whose errors are spread one by one; beyond the block they are spread together
DAMPING_STEPS = 3  # each ten times the one before


class Factor:
    """The Cholesky factor that GPTQ walks along: H[order][:, order]^-1 = U^T U with U upper triangular.

    order     [K] int64, columns by descending diagonal of H
    upper     [K, K] U
    damping   what was added to the diagonal, relative to its mean
    """

    def __init__(self, order: Tensor, upper: Tensor, damping: float) -> None:
        self.order, self.upper, self.damping = order, upper, damping

    @classmethod
    def of(cls, hessian: Tensor, damping: float) -> Factor | None:
        """Of H = E[x x^T] [K, K] with `damping` times its mean diagonal added; more where that is not enough,
        and None where nothing is. An input that was never active gets a diagonal of its own, so its column is
        rounded to nearest and no other column feels it."""
        diagonal = hessian.diagonal()
        mean = float(diagonal.mean()) or 1.0
        order = torch.argsort(diagonal, descending=True, stable=True)
        for step in range(DAMPING_STEPS):
            damped = damping * 10**step
            ordered = hessian[order][:, order]
            ordered.diagonal().mul_(1 + damped).add_(mean * (diagonal[order] == 0))
            lower, failed = torch.linalg.cholesky_ex(ordered)
            del ordered
            if not failed:
                inverse = torch.cholesky_inverse(lower)
                del lower
                upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
                if not failed:
                    return cls(order, upper, damped)
        return None

    def importance(self) -> Tensor:
        """[K]: the cost of a squared error in each column once those behind it have made good for it."""
        cost = torch.empty_like(self.upper.diagonal())
        cost[self.order] = self.upper.diagonal().square().reciprocal()
        return cost

    def solve(self, rows: Tensor) -> Tensor:
        """rows [N, K] @ H^-1."""
        solved = torch.empty_like(rows)
        solved[:, self.order] = rows[:, self.order] @ self.upper.T @ self.upper
        return solved


def round_columns(
    weight: Tensor, factor: Factor, scale: Tensor, zero: Tensor | None, spec: QuantSpec
) -> WeightData:
    """`weight` [N, K] on the grid of `scale` and `zero` [N, K/G], column by column along `factor`."""
    k = weight.shape[1]
    group = torch.arange(k, device=weight.device)[factor.order] // (k // scale.shape[1])
    scales = scale.float()[:, group].T.contiguous()  # columns as rows: each is read in one piece
    offset = None if zero is None else zero.float()[:, group].T.contiguous()
    left = weight.T[factor.order]
    codes = []
    for begin in range(0, k, BLOCK):
        at = slice(begin, min(begin + BLOCK, k))
        zeros = None if offset is None else offset[at]
        rounded, errors = _round_block(left[at], scales[at], zeros, factor.upper[at, at], spec)
        codes.append(rounded)
        left[at.stop :] -= factor.upper[at, at.stop :].T @ errors
    values = torch.empty(weight.T.shape, dtype=torch.uint8, device=weight.device)
    values[factor.order] = torch.cat(codes)
    return WeightData(values.T.contiguous(), scale, zero, bits=spec.bits)


def _round_block(
    block: Tensor, scales: Tensor, zeros: Tensor | None, upper: Tensor, spec: QuantSpec
) -> tuple[Tensor, Tensor]:
    """Round the columns `block` [columns, N] in turn, spreading each error over the rest of them: their codes
    uint8 and errors / U_ii, both [columns, N]. On a GPU the launches are the cost, so there are few."""
    errors = torch.empty_like(block)
    inverse = upper.diagonal().reciprocal()
    codes = []
    for i, (column, scale, share, error) in enumerate(zip(block, scales, inverse, errors, strict=True)):
        zero = spec.midpoint if zeros is None else zeros[i]
        code = affine.nearest(column, scale, zero, spec)
        codes.append(code)
        torch.mul(torch.addcmul(column, code - zero, scale, value=-1), share, out=error)
        block[i + 1 :].addr_(upper[i, i + 1 :], error, alpha=-1)
    return torch.stack(codes).to(torch.uint8), errors
