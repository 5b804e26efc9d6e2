"""Bits under a budget: what each fused Linear of each layer costs at each width, and which to spend bits on.

One sweep over the layers measures them all: for every fused Linear and every width a stream of hidden states
sets out, in which that Linear alone is rounded, and travels on through exact layers beside the others. Behind
the last layer its KL divergence from the exact model is the price of that choice. Then the cheapest widths
are raised one after the other, each time where a byte saves most KL, until the budget is spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from qrt.errors import ConfigError
from qrt.quant.weight import WEIGHT_ONLY
from qrt_calibrate.estimate.preflight import (
    COUNTED,
    bits_per_weight,
    linear_bytes,
    linear_weights,
    output_bytes,
)
from qrt_calibrate.job.plan import Job
from qrt_calibrate.model.decoder import Decoder, read_layer
from qrt_calibrate.recipe.recipe import Grid, Override, Recipe, grid_of
from qrt_calibrate.recipe.selection import matches
from qrt_calibrate.rounding.fold import linear
from qrt_calibrate.rounding.rtn import round_weight

WINDOWS = 4  # that measure; hidden states of all candidates are kept
SLACK = 1e-9  # rounding error of sums, in bits per weight
SIXTEEN = 16  # stands for what a Linear has, 32 in a float32 checkpoint


@dataclass(frozen=True)
class Unit:
    """A fused Linear.

    parts     the full names of its Linears
    weights   how many weights it has
    sizes     width -> bits per weight on disk, counted as `preflight.bits_per_weight` does
    """

    parts: tuple[str, ...]
    weights: int
    sizes: Mapping[int, float]


@dataclass(frozen=True)
class Settled:
    """Linears with a width that is already decided: how many weights they have, and how many bits in all."""

    weights: int = 0
    bits: float = 0

    def average(self, units: list[Unit], sizes: Iterable[float]) -> float:
        """Return the bits per weight of these Linears together with `units` of the given `sizes`."""
        bits = self.bits + sum(unit.weights * size for unit, size in zip(units, sizes, strict=True))
        return bits / (self.weights + sum(unit.weights for unit in units))


@dataclass(frozen=True)
class Point:
    """One step of the trade-off: bits per weight of all Linears, the KL expected, and what was raised."""

    bits: float
    kl: float
    change: str


@dataclass(frozen=True)
class Allocation:
    """The widths chosen, as overrides of the recipe's grid, and the way there."""

    overrides: tuple[Override, ...]
    curve: tuple[Point, ...]


@dataclass(frozen=True)
class Budget:
    """What there is to choose, and how much it may take.

    units         fused Linears whose width is open
    grids         width -> what a unit becomes, None: it stays as it is
    settled       the other Linears of the layers
    bits          most bits per weight, on average over all Linears of the layers
    rest_bytes    of all other tensors of the result
    """

    units: list[Unit]
    grids: dict[int, Grid | None]
    settled: Settled
    bits: float
    rest_bytes: float

    @property
    def weights(self) -> int:
        """Count the weights of all Linears in the layers."""
        return self.settled.weights + sum(unit.weights for unit in self.units)

    @property
    def narrowest(self) -> float:
        """Bits per weight where all units are at their narrowest."""
        return self.settled.average(self.units, [min(unit.sizes.values()) for unit in self.units])

    @property
    def widest(self) -> float:
        """Bits per weight where all units stay as they are."""
        return self.settled.average(self.units, [max(unit.sizes.values()) for unit in self.units])

    def line(self, own: Grid) -> str:
        """For the screen, before anything is chosen and while all units are on their `own` grid."""
        bits = (self.narrowest, self.bits)
        least, most = ((self.rest_bytes + self.weights * each / 8) / 1e9 for each in bits)
        return (
            f"bits are still to be chosen for {len(self.units)} fused Linears: {_rounded_up(bits[0])} to "
            f"{bits[1]:.6g} {COUNTED}; output {least:.4g} to {most:.4g} GB; the sizes below are of "
            f"{own.describe()} for all"
        )


def budget_of(job: Job) -> Budget:
    """Return the choice that target_bits or max_size leaves; ConfigError where it leaves none."""
    recipe = job.recipe
    grids: dict[int, Grid | None] = {bits: _grid(job, bits) for bits in WEIGHT_ONLY} | {SIXTEEN: None}
    units = _units(job, grids)
    if not units:
        raise ConfigError(
            f"{recipe.budget_flag}: every Linear is settled by an override or --ignore; remove one of them, "
            "or the budget"
        )
    weights, total = linear_weights(job, job.grids), bits_per_weight(job)
    rest = output_bytes(job) - weights * total / 8
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
    """ConfigError for a budget that the narrowest widths exceed, or that the Linears keep as they are."""
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


def allocate(job: Job, budget: Budget, windows: Tensor) -> Allocation:
    """Widths of 4, 8 or 16 bits within the budget.

    windows   token ids [B, T] that measure
    """
    rounded = {bits: grid for bits, grid in budget.grids.items() if grid}
    prices = measure(job, budget.units, rounded, windows)
    return spend(budget.units, prices, budget.grids, budget.bits, budget.settled)


def _grid(job: Job, bits: int) -> Grid:
    """Return the recipe's grid at another width: the same group size, symmetric if the width is 8."""
    own = job.recipe.grid
    if own.spec.bits == bits:
        return own
    symmetric = own.spec.symmetric if bits == min(WEIGHT_ONLY) else True
    return Grid(WEIGHT_ONLY[bits], grid_of(WEIGHT_ONLY[bits], own.spec.group_size or -1, symmetric))


def _units(job: Job, grids: Mapping[int, Grid | None]) -> list[Unit]:
    """Return the fused Linears that neither --ignore nor an override settles."""
    patterns = [override.pattern for override in job.recipe.overrides]
    units = []
    for index in range(job.config.num_layers):
        for _, names in job.arch.fuse:
            parts = tuple(f"{job.layer_name(index)}.{name}" for name in names)
            settled = any(matches(part, pattern) for part in parts for pattern in patterns)
            if job.grids[parts[0]] is not None and not settled:
                weights = linear_weights(job, parts)
                sizes = {
                    bits: 8 * sum(linear_bytes(job, part, grid) for part in parts) / weights
                    for bits, grid in grids.items()
                }
                units.append(Unit(parts, weights, sizes))
    return units


@torch.no_grad()
def measure(
    job: Job, units: list[Unit], grids: Mapping[int, Grid], windows: Tensor
) -> dict[tuple[int, int], float]:
    """KL divergence, nats per token, of the model with one unit rounded: (unit's number, bits) -> KL."""
    decoder = Decoder(job.checkpoint, job.arch, windows.shape[1], job.device)
    exact = decoder.embed(windows)
    streams: dict[tuple[int, int], Tensor] = {}
    numbers = {unit.parts[0]: number for number, unit in enumerate(units)}
    for index in tqdm(range(job.config.num_layers), "Measuring bits", unit="layer"):
        name = job.layer_name(index)
        tensors = read_layer(job.checkpoint, name)
        layer = decoder.load(index, tensors)

        def run(hidden: Tensor, index: int = index, layer: nn.Module = layer) -> Tensor:
            return decoder.run(index, layer, hidden).cpu()

        streams = {key: run(hidden) for key, hidden in streams.items()}
        for first, number in numbers.items():
            if first.startswith(f"{name}."):
                parts = [part.removeprefix(f"{name}.") for part in units[number].parts]
                for bits, grid in grids.items():
                    streams[number, bits] = _rounded(layer, parts, grid, job, partial(run, exact))
        exact = run(exact)
    return {key: _divergence(decoder, exact, hidden) for key, hidden in streams.items()}


def _rounded(layer: nn.Module, parts: list[str], grid: Grid, job: Job, run: Callable[[], Tensor]) -> Tensor:
    """Return what `run` gives while `parts` of `layer` are rounded to nearest."""
    kept = [linear(layer, part).weight.clone() for part in parts]
    for part in parts:
        weight = linear(layer, part).weight
        weight.copy_(round_weight(weight, grid.spec, job.scale_dtype).dequantize())
    hidden = run()
    for part, weight in zip(parts, kept, strict=True):
        linear(layer, part).weight.copy_(weight)
    return hidden


def _divergence(decoder: Decoder, exact: Tensor, hidden: Tensor) -> float:
    total = 0.0
    for own, other in zip(exact, hidden, strict=True):
        p, q = (F.log_softmax(decoder.logits(h), -1) for h in (own, other))
        total += float(F.kl_div(q, p, reduction="batchmean", log_target=True))
    return total / len(exact)


def _cost(unit: Unit, width: int, wider: int) -> float:
    """Bits that a wider unit takes in addition."""
    return unit.weights * (unit.sizes[wider] - unit.sizes[width])


def spend(
    units: list[Unit],
    prices: Mapping[tuple[int, int], float],
    grids: Mapping[int, Grid | None],
    target_bits: float,
    settled: Settled = Settled(),
) -> Allocation:
    """Raise widths greedily from the narrowest, which fits; the target counts the `settled` Linears too."""
    widths = sorted(grids)
    total = settled.weights + sum(unit.weights for unit in units)
    chosen = dict.fromkeys(range(len(units)), widths[0])

    def price(number: int, width: int) -> float:
        return prices.get((number, width), 0.0)  # 16 bits are exact

    def average() -> float:
        return settled.average(units, (units[number].sizes[width] for number, width in chosen.items()))

    curve = [Point(average(), sum(price(*pair) for pair in chosen.items()), f"all at {widths[0]} bits")]
    while True:
        room = (target_bits - average()) * total
        moves = [
            ((price(number, width) - price(number, wider)) / cost, number, wider)
            for number, width in chosen.items()
            for wider in widths
            if wider > width and (cost := _cost(units[number], width, wider)) <= room + 1e-6
        ]
        worth = [move for move in moves if move[0] > 0]
        if not worth:
            break
        _, number, wider = max(worth, key=lambda move: (move[0], -move[1], -move[2]))
        chosen[number] = wider
        bits = wider if grids[wider] else units[number].sizes[wider]
        change = f"{', '.join(units[number].parts)} to {bits:g} bits"
        curve.append(Point(average(), sum(price(*pair) for pair in chosen.items()), change))
    overrides = [
        Override(part, grids[width]) for number, width in chosen.items() for part in units[number].parts
    ]
    return Allocation(tuple(overrides), tuple(curve))
