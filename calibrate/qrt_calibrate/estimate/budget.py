"""A budget of bits: which fused Linears have an open width, the size of each width, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qrt.errors import ConfigError
from qrt.quant.weight import WEIGHT_SCHEMES, by_bits
from qrt_calibrate.estimate.sizes import (
    COUNTED,
    bits_per_weight,
    linear_bytes,
    linear_weights,
    output_bytes,
)
from qrt_calibrate.job.plan import Job
from qrt_calibrate.recipe.recipe import LinearRecipe, Recipe, grid_of
from qrt_calibrate.recipe.selection import meant

SLACK = 1e-9  # rounding error of sums, in bits per weight
SIXTEEN = 16  # stands for the width a Linear already has, which is 32 in a float32 checkpoint


@dataclass(frozen=True)
class Unit:
    """A fused Linear.

    parts     full names of its Linears
    weights   number of its weights
    sizes     bits per weight on disk by width, counted as `sizes.bits_per_weight` does
    """

    parts: tuple[str, ...]
    weights: int
    sizes: Mapping[int, float]


@dataclass(frozen=True)
class Settled:
    """Linears whose width is already decided: the number of their weights, and of their bits in all."""

    weights: int = 0
    bits: float = 0

    def average(self, units: list[Unit], sizes: Iterable[float]) -> float:
        """Return the bits per weight of these Linears together with `units` of the given `sizes`."""
        bits = self.bits + sum(unit.weights * size for unit, size in zip(units, sizes, strict=True))
        return bits / (self.weights + sum(unit.weights for unit in units))


@dataclass(frozen=True)
class Budget:
    """The open choices, and how much they may take.

    units         fused Linears whose width is open
    grids         grid of a unit by width; None leaves it unchanged
    settled       the other Linears of the layers
    bits          most bits per weight, on average over all Linears of the layers
    rest_bytes    bytes of all other tensors of the result
    """

    units: list[Unit]
    grids: dict[int, LinearRecipe | None]
    settled: Settled
    bits: float
    rest_bytes: float

    @property
    def weights(self) -> int:
        """Count the weights of all Linears in the layers."""
        return self.settled.weights + sum(unit.weights for unit in self.units)

    @property
    def narrowest(self) -> float:
        """Bits per weight with all units at their narrowest."""
        return self.settled.average(self.units, [min(unit.sizes.values()) for unit in self.units])

    @property
    def widest(self) -> float:
        """Bits per weight with all units unchanged."""
        return self.settled.average(self.units, [max(unit.sizes.values()) for unit in self.units])

    def line(self, own: LinearRecipe) -> str:
        """Return a line for the screen, while nothing is chosen and all units have their `own` grid."""
        bits = (self.narrowest, self.bits)
        least, most = ((self.rest_bytes + self.weights * each / 8) / 1e9 for each in bits)
        return (
            f"bits are still to be chosen for {len(self.units)} fused Linears: {_rounded_up(bits[0])} to "
            f"{bits[1]:.6g} {COUNTED}; output {least:.4g} to {most:.4g} GB; the sizes below are of "
            f"{own.describe()} for all"
        )


def budget_of(job: Job) -> Budget:
    """Return the choice that target_bits or max_size leaves; ConfigError if it leaves none."""
    recipe = job.recipe
    schemes = by_bits(WEIGHT_SCHEMES[recipe.scheme].int8_tokens)
    grids: dict[int, LinearRecipe | None] = {
        bits: _grid(recipe.grid, schemes[bits], bits) for bits in schemes
    }
    grids[SIXTEEN] = None
    units = _units(job, grids)
    if not units:
        raise ConfigError(
            f"{recipe.budget_flag}: every Linear is settled by an override or --ignore; remove one of them, "
            "or the budget"
        )
    checkpoint, dtype = job.checkpoint, job.scale_dtype
    weights, total = linear_weights(checkpoint, job.grids), bits_per_weight(checkpoint, job.grids, dtype)
    rest = output_bytes(checkpoint, job.written, dtype) - weights * total / 8
    bits = recipe.target_bits
    if bits is None:
        assert recipe.max_size is not None
        bits = 8 * (recipe.max_size * 1e9 - rest) / weights
    own = sum(unit.weights * unit.sizes[recipe.spec.bits] for unit in units)
    settled = Settled(weights - sum(unit.weights for unit in units), weights * total - own)
    budget = Budget(units, grids, settled, bits, rest)
    _check_range(recipe, budget)
    return budget


def _check_range(recipe: Recipe, budget: Budget) -> None:
    """Raise ConfigError for a budget below the narrowest widths, or one that changes nothing."""
    narrowest, widest = budget.narrowest, budget.widest
    if narrowest - SLACK <= budget.bits < widest - SLACK:
        return
    least, most = ((budget.rest_bytes + budget.weights * bits / 8) / 1e9 for bits in (narrowest, widest))
    if recipe.target_bits is not None:
        flag, got, unit, least, most = "--target-bits", f"{recipe.target_bits}", "", narrowest, widest
    else:
        flag, got, unit = "--max-size", f"{recipe.max_size} GB", " GB"
    raise ConfigError(
        f"{flag}: expected from {_rounded_up(least)}{unit} (all Linears with an open width at their "
        f"narrowest) to below {most:.6g}{unit} (all of them unchanged), got {got}; choose a value between"
    )


def _rounded_up(value: float) -> str:
    """Round a number up to six digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 5)
    return f"{math.ceil(value / step - SLACK) * step:.6g}"


def _grid(own: LinearRecipe, scheme: str, bits: int) -> LinearRecipe:
    """Return the grid at another width: the same group size if it has groups, symmetric if the width is 8."""
    if own.spec.bits == bits:
        return own
    symmetric, usual = own.spec.symmetric if bits < 8 else True, WEIGHT_SCHEMES[scheme].spec
    assert usual is not None
    size = None if usual.group_size is None else own.spec.group_size or -1
    return LinearRecipe(scheme, grid_of(scheme, size, symmetric))


def _units(job: Job, grids: Mapping[int, LinearRecipe | None]) -> list[Unit]:
    """Return the fused Linears whose width neither --ignore nor an override decides."""
    patterns = (override.pattern for override in job.recipe.overrides)
    settled = {name for pattern in patterns for name in meant(job.arch, job.grids, pattern)}
    units = []
    for index in range(job.arch.num_layers):
        for _, names in job.arch.at(index).fuse:
            parts = tuple(f"{job.layer_name(index)}.{name}" for name in names)
            if job.grids[parts[0]] is not None and settled.isdisjoint(parts):
                weights = linear_weights(job.checkpoint, parts)
                stored = [job.checkpoint.spec(f"{part}.weight") for part in parts]
                sizes = {
                    bits: 8 * sum(linear_bytes(own, grid, job.scale_dtype) for own in stored) / weights
                    for bits, grid in grids.items()
                }
                units.append(Unit(parts, weights, sizes))
    return units
