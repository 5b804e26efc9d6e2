"""The search of progressive grids: one scale for each row, a step and a zero point for each of its groups.

A group's scale is a product c * s of its row's c and a whole step s (`qrt.quant.progressive`), so the groups
of a row depend on each other. The products of all c and s have few mantissas. So each group is rounded once
with each product near the scale at which it just fits, and every candidate of c looks its errors up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qrt.quant.progressive import MOST_STEPS
from qrt.quant.spec import QuantSpec

UNITS = 8  # values of c in a power of two: mantissas of 4 bits, whose products with all steps bf16 holds
LEAST, MOST = 0.62, 1.1  # group scales that are tried, as shares of the one at which the group just fits
CHANNELS = 3 * UNITS  # values of c that are tried: a larger one has no step that half of it has not
MOST_FOR_ALL = 8  # steps that keep int8 with any zero point
_TINY = 1e-10  # as in `affine`: a scale is never zero
_BLOCK_ELEMENTS = 1 << 19  # rows are searched in blocks that stay in a CPU's cache
_GPU_BLOCK_ELEMENTS = 1 << 22  # on a GPU blocks only bound temporary memory


def search_progressive(
    weight: Tensor, importance: Tensor | None, spec: QuantSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Find scales and zero points [..., N, K/G] of least sum of importance * (w - dequantized w)^2.

    weight       [N, K], or several, [E, N, K]
    importance   [K], or [E, K]: cost of a squared error in each column; None: all alike, and fewer zero
                 points are tried
    dtype        of the scales

    Zero points are uint8, None on a symmetric grid. The least is over c of a row, and steps and zero points
    of its groups with which int8 holds all codes times steps; weights are rounded to nearest.
    """
    if weight.dim() == 2:
        own = None if importance is None else importance[None]
        scale, zero = search_progressive(weight[None], own, spec, dtype)
        return scale[0], None if zero is None else zero[0]
    elements = _GPU_BLOCK_ELEMENTS if weight.is_cuda else _BLOCK_ELEMENTS
    each, rows = max(1, elements // weight[0].numel()), max(1, elements // weight.shape[2])
    scales, zeros = [], []
    for begin in range(0, len(weight), each):
        cost = None if importance is None else importance[begin : begin + each, None]
        blocks = weight[begin : begin + each].split(rows, 1)
        found = [_RowBlock(block, cost, spec, dtype).best() for block in blocks]
        scales.append(torch.cat([scale for scale, _ in found], 1))
        zeros.append(torch.cat([zero for _, zero in found], 1))
    return torch.cat(scales).to(dtype), None if spec.symmetric else torch.cat(zeros)


class _Products(NamedTuple):
    """The products of values of c and steps; product i is mantissas[i % P] * 2^(i // P).

    mantissas    [P] from 1 to below 2, ascending
    places       [UNITS, 16] int64: products of the values of c from 1 to below 2 with each step
    """

    mantissas: Tensor
    places: Tensor

    @classmethod
    def on(cls, device: torch.device) -> _Products:
        """Return the tables on `device`."""
        return _products(device)

    def values(self, index: Tensor) -> Tensor:
        """Return products, fp32."""
        count = len(self.mantissas)
        return self.mantissas[index % count] * _power_of_two(index // count)

    def first(self, least: Tensor) -> Tensor:
        """Return the index of the first product that is at least `least`."""
        mantissa, exponent = torch.frexp(least)
        return torch.searchsorted(self.mantissas, 2 * mantissa) + (exponent - 1) * len(self.mantissas)

    @property
    def window(self) -> int:
        """Most products from LEAST to MOST."""
        twice = torch.cat([self.mantissas, 2 * self.mantissas])
        ends = torch.searchsorted(twice, self.mantissas * (MOST / LEAST), right=True)
        return int((ends - torch.arange(len(ends), device=ends.device)).max())


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent, fp32, for normal results; torch.ldexp may miss it by a rounding of its power."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


@cache
def _products(device: torch.device) -> _Products:
    channels = torch.arange(UNITS, 2 * UNITS, dtype=torch.float64) / UNITS
    mantissas, exponents = torch.frexp(channels[:, None] * torch.arange(1, MOST_STEPS + 1))
    own, index = torch.unique(2 * mantissas, return_inverse=True)
    places = index + (exponents - 1) * len(own)
    return _Products(own.float().to(device), places.to(device))


class _RowBlock:
    """A block of rows, with M groups each, and the errors of groups at the products near them.

    fit       [..., N, M] the scale at which a group just fits
    zeros     [..., N, M, Z] zero points that are tried
    barred    [..., N, M, 16, Z] steps that leave int8 with them
    first     [..., N, M] index of the first product that is tried
    errors    [..., N, M, W + 1, Z] errors at it and at those that follow; behind the last they are infinite
    """

    def __init__(
        self, weight: Tensor, importance: Tensor | None, spec: QuantSpec, dtype: torch.dtype
    ) -> None:
        self._table, self._last = _Products.on(weight.device), spec.levels - 1
        self._floor = max(_TINY, torch.finfo(dtype).tiny)
        shape = (-1, spec.group_of(weight.shape[-1]))
        self._groups = weight.unflatten(-1, shape)
        self._cost = None if importance is None else importance.unflatten(-1, shape).expand_as(self._groups)
        low, high = self._groups.amin(-1).clamp(max=0), self._groups.amax(-1).clamp(min=0)
        if spec.symmetric:
            self._fit = torch.maximum(-low, high).mul_(2 / self._last).clamp_(min=self._floor)
            self._zeros = torch.full_like(low, spec.midpoint)[..., None]
        else:
            self._fit = (high - low).div_(self._last).clamp_(min=self._floor)
            zero = torch.round(-low / self._fit)
            near = (zero,) if importance is None else (zero - 1, zero, zero + 1)
            self._zeros = torch.stack(near, -1).clamp_(0, self._last)
        self._steps = torch.arange(1, MOST_STEPS + 1, device=weight.device)
        zeros, steps = self._zeros[..., None, :], self._steps[:, None]
        self._barred = (zeros * steps > 128) | ((self._last - zeros) * steps > 127)
        self._first = self._table.first(LEAST * self._fit)
        whole = slice(None)
        errors = [
            self._rounded(self._table.values(self._first + i), whole) for i in range(self._table.window)
        ]
        self._errors = torch.stack([*errors, torch.full_like(errors[0], torch.inf)], -2)

    def best(self) -> tuple[Tensor, Tensor]:
        """Return the scales, fp32, and zero points, uint8 [..., N, M]."""
        scale, zero = torch.empty_like(self._fit), torch.empty_like(self._fit)
        least = torch.full_like(self._fit[..., :1], torch.inf)
        for number in self._channels():
            error, own_scale, own_zero = self._at(number)
            total = error.sum(-1, keepdim=True)
            better = total < least
            least = torch.where(better, total, least)
            scale, zero = torch.where(better, own_scale, scale), torch.where(better, own_zero, zero)
        return scale, zero.to(torch.uint8)

    def _channels(self) -> Iterator[Tensor]:
        """Yield numbers of values of c, [..., N, 1]; it doubles in UNITS numbers.

        The first one's last step is too small for the largest group.
        """
        mantissa, exponent = torch.frexp(self._fit.amax(-1, keepdim=True) * (LEAST / MOST_STEPS))
        first = ((2 * mantissa - 1) * UNITS).long() + (exponent - 1) * UNITS
        yield from (first + i for i in range(CHANNELS))

    def _at(self, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return error, scale and zero point [..., N, M] of each group with its best step of a value of c."""
        table, width, end = self._table, self._zeros.shape[-1], self._errors.shape[-2] - 1
        octave, unit = number // UNITS, number % UNITS
        channel = (1 + unit / UNITS) * _power_of_two(octave)
        places = table.places[unit] + (octave * len(table.mantissas))[..., None]
        at = (places - self._first[..., None]).clamp_(max=end)
        at.masked_fill_(at < 0, end).masked_fill_(channel[..., None] * self._steps < self._floor, end)
        found = self._errors.gather(-2, at[..., None].expand(*at.shape, width))
        error, choice = found.masked_fill_(self._barred, torch.inf).flatten(-2).min(-1)
        scale = channel * (choice // width + 1)
        zero = self._zeros.gather(-1, (choice % width)[..., None])[..., 0]
        if (beside := error.isinf()).any():  # all steps are beside the products: the first one above them
            start = table.values(self._first).clamp(min=self._floor)
            step = torch.ceil(start / channel)[beside]
            scale[beside] = channel.expand_as(scale)[beside] * step
            each = self._rounded(scale[beside], beside).masked_fill_(step[:, None] > MOST_FOR_ALL, torch.inf)
            error[beside], choice = each.min(-1)
            zero[beside] = self._zeros[beside].gather(-1, choice[:, None])[:, 0]
        return error, scale, zero

    def _rounded(self, scale: Tensor, which: Tensor | slice) -> Tensor:
        """Return the errors [..., Z] of groups with a scale each, `scale` [...], and each zero point."""
        exact = self._groups[which] / scale[..., None]
        nearest, found = exact.round(), []
        wrong = torch.empty_like(exact)
        cost = None if self._cost is None else self._cost[which]
        for zero in self._zeros[which][..., None].unbind(-2):
            torch.maximum(nearest, -zero, out=wrong)  # a CPU's clamp with tensors takes thrice as long
            torch.minimum(wrong, self._last - zero, out=wrong).sub_(exact).square_()
            found.append((wrong if cost is None else wrong.mul_(cost)).sum(-1))
        return torch.stack(found, -1).mul_(scale.square()[..., None])
