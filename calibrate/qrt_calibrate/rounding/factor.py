"""The Cholesky factor of an inverse Hessian, along which GPTQ rounds columns, and rows compensate."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt_calibrate.rounding.precision import EXACT, products

MOVED_ROWS = 4096  # rows of a matrix that are moved together
LEAF = 512  # largest order of a matrix that a CPU factorizes whole
DAMPING_STEPS = 3  # attempts, each with ten times the damping before


class Factor:
    """The Cholesky factor that GPTQ walks along: H[order][:, order]^-1 = U^T U with U upper triangular.

    order     [K] int64, columns by descending diagonal of H
    upper     [K, K] U
    damping   share of each column's own diagonal that was added to it
    """

    def __init__(self, order: Tensor, upper: Tensor, damping: float) -> None:
        self.order, self.upper, self.damping = order, upper, damping

    @classmethod
    def of(cls, hessian: Tensor, damping: float, level: float = 0.0) -> Factor | None:
        """Factorize H = E[x x^T] [K, K], damped; None if no damping is enough.

        To each diagonal element `damping` times itself and `level` times the mean element are added, and more
        damping if that is not enough.

        The level keeps columns with hardly any input from taking over errors that their grids cannot hold. An
        input that was never active gets the mean as its diagonal, so its column is rounded to nearest and
        affects no other column.
        """
        own = hessian.diagonal()
        mean = float(own.mean()) or 1.0
        order = torch.argsort(own, descending=True, stable=True)
        backwards = order.flip(0)
        for step in range(DAMPING_STEPS):
            damped = damping * 10**step
            diagonal = own * (1 + damped) + mean * (level * (own > 0) + (own == 0))
            matrix = _reordered(hessian, backwards)
            matrix.diagonal().copy_(diagonal[backwards])
            with products(EXACT):  # a damped Hessian of many inputs is too ill-conditioned for TF32
                if _inverse_factor(matrix):
                    return cls(order, _turn(matrix), damped)
            del matrix
        return None

    def importance(self) -> Tensor:
        """Return [K]: the cost of a squared error in each column after later columns have compensated."""
        cost = torch.empty_like(self.upper.diagonal())
        cost[self.order] = self.upper.diagonal().square().reciprocal()
        return cost

    def solve(self, rows: Tensor) -> Tensor:
        """Return rows [N, K] @ H^-1."""
        solved = torch.empty_like(rows)
        solved[:, self.order] = rows[:, self.order] @ self.upper.T @ self.upper
        return solved


def _inverse_factor(matrix: Tensor) -> bool:
    """Turn `matrix` = L L^T [n, n] into L^-1 in place; return False if it is not positive definite.

    With rows and columns reversed the result is the U of `Factor`. A CPU halves the matrix recursively: most
    of the work is then products, which are several times faster there than LAPACK's factorizations.
    """
    n = len(matrix)
    if n <= LEAF or matrix.is_cuda:
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            eye = torch.eye(n, device=matrix.device)
            torch.linalg.solve_triangular(lower, eye, upper=False, out=matrix)
        return not failed
    half = n // 2
    first, above = matrix[:half].split((half, n - half), 1)
    beside, second = matrix[half:].split((half, n - half), 1)
    if not _inverse_factor(first):
        return False
    known = beside @ first.T
    if not _inverse_factor(second.addmm_(known, known.T, alpha=-1)):
        return False
    torch.mm(second, known @ first, out=beside).neg_()
    above.zero_()
    return True


def _reordered(matrix: Tensor, order: Tensor) -> Tensor:
    """Return matrix[order][:, order] without a third matrix in memory."""
    found = torch.empty_like(matrix)
    for rows, own in zip(found.split(MOVED_ROWS), order.split(MOVED_ROWS), strict=True):
        rows.copy_(matrix[own][:, order])
    return found


def _turn(matrix: Tensor) -> Tensor:
    """Reverse the rows and the columns of `matrix` [n, n] in place."""
    n = len(matrix)
    for first in range(0, n // 2, MOVED_ROWS):
        last = min(first + MOVED_ROWS, n // 2)
        head, tail = matrix[first:last], matrix[n - last : n - first]
        kept = head.flip(0, 1)
        head.copy_(tail.flip(0, 1))
        tail.copy_(kept)
    middle = matrix[n // 2 : n - n // 2]  # a row where n is odd
    middle.copy_(middle.flip(1))
    return matrix
