"""Correct a stage's weights for the error that came before, then round them.

W' = W + t (W E[(x' - x) x^T] + E[(r' - r) x^T]) H^-1 undoes earlier error as far as a linear map can: the
error of the input x (GPTAQ, arXiv:2504.02692) and, for Linears whose output is added to it, of the residual
stream r. The trust t is measured: a correction on which the two halves of the windows disagree would fit
their noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qrt.quant.weight import WeightData
from qrt_calibrate.recipe.method import Method
from qrt_calibrate.recipe.recipe import LinearRecipe
from qrt_calibrate.rounding.each import round_each
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.gptq import round_columns
from qrt_calibrate.rounding.grid import choose_grid
from qrt_calibrate.rounding.observe import Moments
from qrt_calibrate.rounding.rtn import round_weight
from qrt_calibrate.steps.figures import Figures
from qrt_calibrate.steps.sensitivity import OutputMoments

OWN_DAMPING = 0.01  # share of each column's own diagonal that is added to it
ROW_DAMPING = 0.08  # share of the gradients' moments' diagonal that is added to it


class Rounder:
    """Rounds weights by `method`, with scales in `dtype`; `damping` is that of a recipe."""

    def __init__(self, method: Method, dtype: torch.dtype, damping: float, figures: Figures) -> None:
        self._method, self._dtype, self._damping, self._figures = method, dtype, damping, figures

    def factor(self, moments: Moments) -> Factor | None:
        """Factorize the Hessian of an input; None without GPTQ, or if it cannot be factorized."""
        return Factor.of(moments.hessian, OWN_DAMPING, self._damping) if self._method.gptq else None

    def round(
        self,
        weight: Tensor,
        moments: Moments,
        factor: Factor | None,
        gradients: OutputMoments | None,
        grid: LinearRecipe,
    ) -> WeightData:
        """Round stacked weights [N, K], whose input has `moments`, to `grid`.

        `gradients` are the moments of the loss's gradients at their output; without them each row is rounded
        on its own.
        """
        if factor is None:
            if self._method.gptq:
                self._figures.note("rounded to nearest", 1.0)
            importance = moments.hessian.diagonal() if self._method.clip else None
            return round_weight(weight, grid.spec, self._dtype, importance)
        weight = self._corrected(weight, moments, factor)
        importance = factor.importance() if self._method.clip else None
        scale, zero = choose_grid(weight, grid.spec, self._dtype, importance)
        return round_columns(weight, factor, scale, zero, grid.spec, self._rows(weight, gradients))

    def round_each(
        self,
        weights: Iterator[Tensor],
        moments: Sequence[Moments],
        factors: Sequence[Factor | None],
        grid: LinearRecipe,
    ) -> list[WeightData]:
        """Round several weights [N, K] of one shape, each with an input of its own, as `round` does."""
        known = [factor for factor in factors if factor is not None]
        if len(known) < len(factors):
            given = zip(weights, moments, factors, strict=True)
            return [self.round(weight, own, factor, None, grid) for weight, own, factor in given]
        corrected = map(self._corrected, weights, moments, known)
        stacked = torch.stack(list(corrected))
        each = torch.stack([factor.importance() for factor in known]) if self._method.clip else None
        scale, zero = choose_grid(stacked, grid.spec, self._dtype, each)
        codes = round_each(stacked, known, scale, zero, grid.spec)
        zeros = [None] * len(codes) if zero is None else zero
        parts = zip(codes, scale, zeros, strict=True)
        return [WeightData(*part, bits=grid.spec.bits) for part in parts]

    def _corrected(self, weight: Tensor, moments: Moments, factor: Factor) -> Tensor:
        correction, trust = moments.take_correction(weight, factor.solve)
        # an almost dead input asks for larger weights, which would be infinite in the model dtype
        most = torch.finfo(self._dtype).max / 2
        return correction.mul_(trust).add_(weight).clamp_(-most, most)

    def _rows(self, weight: Tensor, gradients: OutputMoments | None) -> list[Factor]:
        """Factorize the moments of the outputs' gradients; [] if each row is rounded on its own."""
        blocks = gradients.trusted((weight != 0).any(1)) if gradients else ()
        rows = [Factor.of(block, ROW_DAMPING) for block in blocks]
        known = [factor for factor in rows if factor is not None]
        if rows and len(known) == len(rows):
            return known
        self._figures.note("rows each for itself", float(bool(rows)))
        return []
