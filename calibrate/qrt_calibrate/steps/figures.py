"""A layer's figures for the report: its errors on the sample, and notes on how it was rounded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate.recipe.recipe import LinearRecipe
from qrt_calibrate.rounding.fold import linear
from qrt_calibrate.rounding.observe import norm_weights
from qrt_calibrate.rounding.rtn import round_weight
from qrt_calibrate.rounding.search import round_input
from qrt_calibrate.steps.bench import Bench

TOGETHER = 1 << 22  # weights of several Linears that are rounded to nearest together


class Figures:
    """Numbers of one layer by column title; each is the largest among its stages."""

    def __init__(self) -> None:
        self.notes: dict[str, float] = {}

    def note(self, title: str, value: float) -> None:
        """Keep `value` if it is the largest so far under this title."""
        self.notes[title] = max(value, self.notes.get(title, 0.0))


def errors(bench: Bench, grids: Mapping[str, LinearRecipe], dtype: torch.dtype) -> dict[str, float]:
    """Return the error of the rounded layer, and the error of rounding the layer to nearest."""
    own = output_error(bench, bench.rounded)
    nearest = bench.load()
    alike: dict[tuple[LinearRecipe, torch.Size], list[nn.Linear]] = {}
    for name, grid in grids.items():
        module = linear(nearest, name)
        alike.setdefault((grid, module.weight.shape), []).append(module)
    for (grid, shape), modules in alike.items():  # a layer has hundreds of experts' small weights
        together = max(1, TOGETHER // shape.numel())
        for some in (modules[begin : begin + together] for begin in range(0, len(modules), together)):
            stacked = torch.cat([module.weight for module in some])
            rounded = round_weight(stacked, grid.spec, dtype).dequantize()
            for module, weight in zip(some, rounded.split(shape[0]), strict=True):
                module.weight.copy_(weight)
                if WEIGHT_SCHEMES[grid.scheme].int8_tokens:
                    round_input(module)
    return {"output error": own, "output error, rtn": output_error(bench, nearest)}


def output_error(bench: Bench, layer: nn.Module) -> float:
    """Return the error of `layer`'s output on the sample, as the next norm sees it.

    It is relative to what the exact layer adds to its input, or to the input if it adds nothing.
    """
    root = norm_weights(bench.wanted, bench.eps).sqrt()
    found = bench.executor.run(bench.index, layer, bench.start)
    error = ((found - bench.wanted) * root).norm()
    added = ((bench.wanted - bench.start) * root).norm()
    size = added if added else (bench.start * root).norm()
    return float(error / size if size else error)
