"""GPTQ (arXiv:2210.17323): round column by column; later columns compensate for the error of each.

Columns are rounded in the order of the Hessian's diagonal, largest first ("static" activation order). Scales
and zeros are chosen before that and groups keep their columns, so the file does not store the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from math import gcd

import torch
from torch import Tensor

from qrt.quant import affine
from qrt.quant.spec import QuantSpec
from qrt.quant.weight import WeightData
from qrt_calibrate.rounding.precision import EXACT, products

BLOCK = 128  # columns that pass errors on one by one; later blocks get those of a block at once
ROW_BLOCKS = 64  # blocks of rows, where later rows compensate for earlier ones
NARROW = 2048  # most columns of a weight with ROW_BLOCKS
WIDE_ROW_BLOCKS = 16  # of a wider weight: it has many column blocks, and each block costs some launches
CACHED_ROWS = 4096  # rows that a CPU rounds at a time: a block's columns stay in its cache
WALK_BYTES = 13  # per weight while its Linear is rounded: as given, as moved, its error, its code
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


def round_columns(
    weight: Tensor,
    factor: Factor,
    scale: Tensor,
    zero: Tensor | None,
    spec: QuantSpec,
    rows: Sequence[Factor] = (),
) -> WeightData:
    """Round `weight` [N, K] to the grid of `scale` and `zero` [N, K/G], column by column along `factor`.

    `rows` are factors of E[g g^T] of the outputs' gradients, one for each run of successive rows. With them
    later rows compensate for the errors of earlier rows too (YAQA, arXiv:2505.22988, on scalar grids). Rows
    with the largest gradients come first; rows of one row block do not affect each other.
    """
    return _Walk(weight, factor, scale, zero, spec, rows).run()


class _Walk:
    """Walk over blocks of rows by blocks of columns.

    A block depends on the blocks before it in its row and in its column, so a whole antidiagonal is rounded
    at once: there are hardly more steps than columns.

    members   [R, N/R] the rows of each row block
    target    [R, K, N/R] weights, moved by errors of earlier rows; columns in the order of the walk
    groups    [K] the group of each of these columns, whose scales and zeros are [R, K/G, N/R]
    errors    [R, K, N/R] errors / U_ii of the columns rounded so far, which move later columns
    spread    for each row block, the effect of its errors on later rows of its run: [runs, n, later rows] for
              successive runs of one length, of which n rows each are in the block
    """

    def __init__(
        self,
        weight: Tensor,
        factor: Factor,
        scale: Tensor,
        zero: Tensor | None,
        spec: QuantSpec,
        rows: Sequence[Factor],
    ) -> None:
        n, k = weight.shape
        self._spec, self._factor, self._scale, self._zero = spec, factor, scale, zero
        runs = [len(own.order) for own in rows]
        self._count = gcd(ROW_BLOCKS if k <= NARROW else WIDE_ROW_BLOCKS, *runs) if runs else 1
        self._width = gcd(BLOCK, k)
        alike = [list(own) for _, own in groupby(rows, lambda own: len(own.order))]
        self._shares = [sum(len(own.order) for own in some) // self._count for some in alike]
        orders = [own.order + begin for own, begin in zip(rows, accumulate([0, *runs]), strict=False)]
        blocks = [order.view(self._count, -1) for order in orders]
        self._members = torch.cat(blocks, 1) if blocks else torch.arange(n, device=weight.device)[None]
        factors = [torch.stack([own.upper for own in some]) for some in alike]
        self._spread = [[_spread(own, block, self._count) for own in factors] for block in range(self._count)]
        del factors
        self._groups = factor.order // (k // scale.shape[1])
        each = torch.arange(scale.shape[1], device=weight.device)
        self._target = self._arranged(weight, factor.order)
        self._scales = self._arranged(scale.float(), each)
        self._zeros = None if zero is None else self._arranged(zero.float(), each)
        self._errors = torch.empty_like(self._target)
        self._codes = torch.empty(self._target.shape, dtype=torch.uint8, device=weight.device)

    def _arranged(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Rearrange rows [N, C] to [R, columns, N/R], some columns at a time."""
        found = rows.new_empty(len(self._members), len(columns), self._members.shape[1])
        for own, some in zip(found.split(BLOCK, 1), columns.split(BLOCK), strict=True):
            own.copy_(rows[:, some][self._members].transpose(1, 2))
        return found

    def run(self) -> WeightData:
        """Round all blocks."""
        k = self._target.shape[1]
        waves = k // self._width + self._count - 1
        for wave in range(waves):
            first = max(0, wave - k // self._width + 1)
            blocks = range(first, min(self._count, wave + 1))
            at = [(b, slice((wave - b) * self._width, (wave - b + 1) * self._width)) for b in blocks]
            self._round(at)
        values = torch.empty(self._members.numel(), k, dtype=torch.uint8, device=self._codes.device)
        ordered = self._codes.transpose(1, 2).flatten(0, 1)
        values[self._members.flatten()[:, None], self._factor.order] = ordered
        return WeightData(values, self._scale, self._zero, bits=self._spec.bits)

    def _round(self, at: list[tuple[int, slice]]) -> None:
        """Round the blocks `at` (row block, columns) of successive row blocks, and pass on their errors."""
        target = torch.stack([self._target[b, span] for b, span in at])
        block = torch.stack([self._moved(b, span) for b, span in at])
        groups = torch.stack([self._groups[span] for _, span in at])
        own = torch.arange(at[0][0], at[-1][0] + 1, device=groups.device)[:, None]  # the row blocks
        scales = self._scales[own, groups]
        zeros: Tensor | int = self._spec.midpoint
        if self._zeros is not None:
            zeros = self._zeros[own, groups]
        upper = torch.stack([self._factor.upper[span, span] for _, span in at])
        codes, errors = round_block(block, scales, zeros, upper, self._spec)
        wrong = target.sub_((codes - zeros).mul_(scales))
        for (b, span), code, error, left in zip(at, codes, errors, wrong, strict=True):
            self._codes[b, span] = code.to(torch.uint8)
            self._errors[b, span] = error
            if self._shares and b + 1 < self._count:
                self._pass_on(b, span, left)

    def _moved(self, block: int, span: slice) -> Tensor:
        """Return the target of columns `span` of row block `block`, moved by errors of earlier columns."""
        target = self._target[block, span]
        if not span.start:
            return target
        upper = self._factor.upper[: span.start, span]
        return torch.addmm(target, upper.T, self._errors[block, : span.start], alpha=-1)

    def _pass_on(self, block: int, span: slice, wrong: Tensor) -> None:
        """Move the later rows of columns `span` by the errors `wrong` [columns, N/R] of row block `block`."""
        behind = self._target[block + 1 :, span].split(self._shares, -1)
        for later, spread, own in zip(
            behind, self._spread[block], wrong.split(self._shares, -1), strict=True
        ):
            runs = len(spread)
            moves = torch.bmm(own.unflatten(-1, (runs, -1)).transpose(0, 1), spread)
            moves = moves.unflatten(-1, (len(later), -1)).permute(2, 1, 0, 3)
            later.unflatten(-1, (runs, -1)).sub_(moves)


def _spread(upper: Tensor, block: int, count: int) -> Tensor:
    """Return the effect of errors in row block `block` of `count` on later rows: [runs, n, later rows].

    `upper` [runs, rows, rows] holds the factors of the runs.
    """
    n = upper.shape[1] // count
    span = slice(block * n, (block + 1) * n)
    with products(EXACT):
        return torch.linalg.solve_triangular(upper[:, span, span], upper[:, span, span.stop :], upper=True)


def round_block(
    block: Tensor, scales: Tensor, zeros: Tensor | int, upper: Tensor, spec: QuantSpec
) -> tuple[Tensor, Tensor]:
    """Round the columns of `block` [blocks, columns, rows] in turn.

    `upper` [blocks, columns, columns] spreads each error over the columns that follow. Returns codes and
    errors / U_ii, both fp32 and of the block's shape.
    """
    if block.is_cuda:
        from qrt_calibrate.rounding import gptq_kernel

        known = None if isinstance(zeros, int) else zeros
        return gptq_kernel.round_block(block, scales, known, upper, spec.midpoint, spec.levels)
    if block.shape[2] > CACHED_ROWS:
        blocks = [part.contiguous() for part in block.split(CACHED_ROWS, -1)]
        offsets = [zeros] * len(blocks) if isinstance(zeros, int) else zeros.split(CACHED_ROWS, -1)
        parts = [
            round_block(own, scale.contiguous(), zero, upper, spec)
            for own, scale, zero in zip(blocks, scales.split(CACHED_ROWS, -1), offsets, strict=True)
        ]
        return torch.cat([codes for codes, _ in parts], -1), torch.cat([errors for _, errors in parts], -1)
    errors, codes = torch.empty_like(block), torch.empty_like(block)
    inverse = upper.diagonal(dim1=1, dim2=2).reciprocal()[..., None]
    each = zip(*(part.unbind(1) for part in (block, scales, codes, errors, inverse, upper)), strict=True)
    offsets = [zeros] * block.shape[1] if isinstance(zeros, int) else zeros.unbind(1)
    for i, (column, scale, code, error, own, row) in enumerate(each):
        code.copy_(affine.nearest(column, scale, offsets[i], spec))
        torch.mul(torch.addcmul(column, code - offsets[i], scale, value=-1), own, out=error)
        block[:, i + 1 :].addcmul_(row[:, i + 1 :, None], error[:, None], value=-1)
    return codes, errors
