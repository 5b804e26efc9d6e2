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
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.precision import EXACT, products

BLOCK = 32  # columns that pass errors on one by one on a CPU; later blocks get those of a block at once
GPU_BLOCK = 128  # the same on a GPU
ROW_BLOCKS = 64  # blocks of rows, where later rows compensate for earlier ones
NARROW = 2048  # most columns of a weight with ROW_BLOCKS
WIDE_ROW_BLOCKS = 16  # of a wider weight: it has many column blocks, and each block costs some launches
CACHED_ROWS = 4096  # rows that a CPU rounds at a time: a block's columns stay in its cache
WALK_BYTES = 13  # per weight while its Linear is rounded: as given, as moved, its error, its code


def block_width(weight: Tensor) -> int:
    """Return how many columns of `weight` [..., K] are in a block."""
    return gcd(GPU_BLOCK if weight.is_cuda else BLOCK, weight.shape[-1])


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


class _Wave:
    """The blocks (row block, column block) on antidiagonal `number` of `rows` by `columns` blocks.

    rows, columns   int64 [b], for indexing
    """

    def __init__(self, number: int, rows: int, columns: int, device: torch.device) -> None:
        first, last = max(0, number - rows + 1), min(columns - 1, number)
        self.blocks = [(number - column, column) for column in range(first, last + 1)]
        self.columns = torch.arange(first, last + 1, device=device)
        self.rows = number - self.columns


class _Runs:
    """Weights of runs of rows that have one length, and how rows compensate for earlier ones.

    targets   [C, runs, w, R, m] in C blocks of w columns and R row blocks, with m rows of each run. A rounded
              block holds what its codes lack of its weights instead
    spread    [runs, R * m, R * m] the effect of what a row lacks on rows of later row blocks; None: no effect
    """

    def __init__(self, weights: Tensor, factors: Sequence[Factor], width: int) -> None:
        """Take `weights` [K, R, runs * m], and a factor of each run, or none."""
        runs = weights.unflatten(2, (len(factors) or 1, -1)).unflatten(0, (-1, width))
        self._targets = runs.permute(0, 3, 1, 2, 4).contiguous()
        self._spread = None
        if factors:
            self._spread = _spread(torch.stack([own.upper for own in factors]), weights.shape[1])

    def at(self, wave: _Wave) -> Tensor:
        """Return the weights [b, w, runs * m] of a wave, moved by what earlier rows lack."""
        targets = self._targets[wave.columns, :, :, wave.rows]
        rows = targets.shape[-1]
        for own, (block, column) in zip(targets, wave.blocks, strict=True):
            if self._spread is not None and block:
                begin, end = block * rows, (block + 1) * rows
                before = self._targets[column].flatten(2)[..., :begin]
                own.baddbmm_(before, self._spread[:, :begin, begin:end], alpha=-1)
        return targets.transpose(1, 2).flatten(2)

    def keep(self, wave: _Wave, lacking: Tensor) -> None:
        """Keep what the codes of a wave lack, [b, w, runs * m]."""
        if self._spread is not None:
            runs = lacking.unflatten(2, (len(self._spread), -1))
            self._targets[wave.columns, :, :, wave.rows] = runs.transpose(1, 2)


class _Walk:
    """Walk over blocks of rows by blocks of columns.

    A block depends on the blocks before it in its row and in its column, so a whole antidiagonal, a wave, is
    rounded at once: there are hardly more steps than columns. There are R row blocks of n rows and C blocks
    of w columns.

    members   [R, n] the rows of each row block
    groups    [C, w] the group of each column, whose scales and zeros are [K/G, R, n]
    codes     [C, w, R, n]
    errors    [R, K, n] errors / U_ii of the columns rounded so far, which move later columns
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
        lengths = [len(own.order) for own in rows]
        count = gcd(ROW_BLOCKS if k <= NARROW else WIDE_ROW_BLOCKS, *lengths) if rows else 1
        orders = [own.order + begin for own, begin in zip(rows, accumulate([0, *lengths]), strict=False)]
        orders = orders or [torch.arange(n, device=weight.device)]
        self._members = torch.cat([order.view(count, -1) for order in orders], 1)
        self._groups = (factor.order // (k // scale.shape[1])).view(-1, block_width(weight))
        alike = [list(own) for _, own in groupby(rows, lambda own: len(own.order))] or [[]]
        shares = [sum(len(own.order) for own in some) // count or n for some in alike]
        parts = self._arranged(weight, factor.order).split(shares, 2)
        width = self._groups.shape[1]
        self._runs = [_Runs(own, some, width) for own, some in zip(parts, alike, strict=True)]
        del parts
        each = torch.arange(scale.shape[1], device=weight.device)
        self._scales = self._arranged(scale.float(), each)
        self._zeros = None if zero is None else self._arranged(zero.float(), each)
        self._errors = weight.new_empty(count, k, n // count)
        shape = (*self._groups.shape, *self._members.shape)
        self._codes = torch.empty(shape, dtype=torch.uint8, device=weight.device)

    def _arranged(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Rearrange rows [N, C] to [columns, R, n], some columns at a time."""
        found = rows.new_empty(len(columns), *self._members.shape)
        for own, some in zip(found.split(GPU_BLOCK), columns.split(GPU_BLOCK), strict=True):
            own.copy_(rows[:, some].T[:, self._members])
        return found

    def run(self) -> WeightData:
        """Round all blocks."""
        rows, columns = len(self._members), len(self._groups)
        for number in range(columns + rows - 1):
            self._round(_Wave(number, rows, columns, self._codes.device))
        codes = self._codes.flatten(2).flatten(0, 1).T
        values = torch.empty(codes.shape, dtype=codes.dtype, device=codes.device)
        values[self._members.flatten()[:, None], self._factor.order] = codes
        return WeightData(values, self._scale, self._zero, bits=self._spec.bits)

    def _round(self, wave: _Wave) -> None:
        """Round the blocks of a wave."""
        parts = [own.at(wave) for own in self._runs]
        target = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
        at = self._groups[wave.columns], wave.rows[:, None]
        scales = self._scales[at]
        zeros: Tensor | int = self._spec.midpoint if self._zeros is None else self._zeros[at]
        block, upper = self._moved(target, wave)
        codes, errors = round_block(block, scales, zeros, upper, self._spec)
        self._codes[wave.columns, :, wave.rows] = codes.to(torch.uint8)
        self._errors.unflatten(1, self._groups.shape)[wave.rows, wave.columns] = errors
        lacking = target.sub_((codes - zeros).mul_(scales)).split([own.shape[2] for own in parts], 2)
        for runs, own in zip(self._runs, lacking, strict=True):
            runs.keep(wave, own)

    def _moved(self, target: Tensor, wave: _Wave) -> tuple[Tensor, Tensor]:
        """Return `target` [b, w, n] moved by errors of earlier columns, and U [b, w, w] of its columns."""
        moved, factors, width = target.clone(), [], target.shape[1]
        for own, (row, column) in zip(moved, wave.blocks, strict=True):
            begin = column * width
            before, upper = self._factor.upper[: begin + width, begin : begin + width].split((begin, width))
            if begin:
                own.addmm_(before.T, self._errors[row, :begin], alpha=-1)
            factors.append(upper)
        return moved, torch.stack(factors)


def _spread(upper: Tensor, count: int) -> Tensor:
    """Return the effect of errors of rows on rows of later ones of `count` blocks, in place of `upper`.

    `upper` [runs, rows, rows] holds the factors of the runs.
    """
    n = upper.shape[1] // count
    with products(EXACT):
        for begin in range(0, upper.shape[1], n):
            end = begin + n
            own, later = upper[:, begin:end, begin:end], upper[:, begin:end, end:]
            later.copy_(torch.linalg.solve_triangular(own, later, upper=True))
    return upper


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
    codes, errors = [], []
    inverse = upper.diagonal(dim1=1, dim2=2).reciprocal()[..., None]
    each = zip(*(part.unbind(1) for part in (block, scales, inverse, upper)), strict=True)
    offsets = [zeros] * block.shape[1] if isinstance(zeros, int) else zeros.unbind(1)
    for i, (column, scale, own, row) in enumerate(each, 1):
        code = affine.nearest(column, scale, offsets[i - 1], spec)
        error = torch.addcmul(column, code - offsets[i - 1], scale, value=-1).mul_(own)
        block[:, i:].addcmul_(row[:, i:, None], error[:, None], value=-1)
        codes.append(code)
        errors.append(error)
    return torch.stack(codes, 1), torch.stack(errors, 1)
