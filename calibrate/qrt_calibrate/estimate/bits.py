"""Bits under a budget: measure the cost of each fused Linear at each width, then spend the bits.

One pass over the layers measures all. For every fused Linear and every width a stream of hidden states
begins, in which only that Linear is rounded; it continues through exact layers. After the last layer its KL
divergence from the exact model is the price of that choice. Then widths are raised one by one from the
narrowest, each time where a byte saves most KL, until the budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate.estimate.budget import Budget, Settled, Unit
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.recipe.recipe import LinearRecipe, Override
from qrt_calibrate.rounding.fold import linear
from qrt_calibrate.rounding.rtn import round_weight
from qrt_calibrate.rounding.search import round_input

WINDOWS = 4  # windows that measure; hidden states of all candidates are kept


@dataclass(frozen=True)
class Point:
    """One step of the trade-off: bits per weight of all Linears, the expected KL, and the width raised."""

    bits: float
    kl: float
    change: str


@dataclass(frozen=True)
class Allocation:
    """The chosen widths, as overrides of the recipe's grid, and the steps that led to them."""

    overrides: tuple[Override, ...]
    curve: tuple[Point, ...]


def allocate(executor: LayerExecutor, budget: Budget, windows: Tensor, dtype: torch.dtype) -> Allocation:
    """Choose 4, 8 or 16 bits for every unit of the budget, by their cost on `windows`.

    windows   token ids [B, T]
    dtype     of the scales
    """
    rounded = {bits: grid for bits, grid in budget.grids.items() if grid}
    prices = measure(executor, budget.units, rounded, windows, dtype)
    return spend(budget.units, prices, budget.grids, budget.bits, budget.settled)


@torch.no_grad()
def measure(
    executor: LayerExecutor,
    units: list[Unit],
    grids: Mapping[int, LinearRecipe],
    windows: Tensor,
    dtype: torch.dtype,
) -> dict[tuple[int, int], float]:
    """Measure the KL divergence, nats per token, with one unit rounded: (number of the unit, bits) -> KL."""
    exact = executor.embed(windows)
    streams: dict[tuple[int, int], Tensor] = {}
    numbers = {unit.parts[0]: number for number, unit in enumerate(units)}
    for index in tqdm(range(executor.num_layers), "Measuring bits", unit="layer"):
        name, layer = executor.layer_name(index), executor.load_stored(index)

        def run(hidden: Tensor, index: int = index, layer: nn.Module = layer) -> Tensor:
            return executor.run(index, layer, hidden).cpu()

        streams = {key: run(hidden) for key, hidden in streams.items()}
        for first, number in numbers.items():
            if first.startswith(f"{name}."):
                parts = [part.removeprefix(f"{name}.") for part in units[number].parts]
                for bits, grid in grids.items():
                    streams[number, bits] = _rounded(layer, parts, grid, dtype, partial(run, exact))
        exact = run(exact)
        executor.expect_finite(name, exact)
    return {key: _divergence(executor, exact, hidden) for key, hidden in streams.items()}


def _rounded(
    layer: nn.Module, parts: list[str], grid: LinearRecipe, dtype: torch.dtype, run: Callable[[], Tensor]
) -> Tensor:
    """Return the result of `run` while `parts` of `layer`, and their tokens, are rounded to nearest."""
    modules = [linear(layer, part) for part in parts]
    kept, hooks = [module.weight.clone() for module in modules], []
    for module in modules:
        module.weight.copy_(round_weight(module.weight, grid.spec, dtype).dequantize())
        if WEIGHT_SCHEMES[grid.scheme].int8_tokens:
            hooks.append(round_input(module))
    hidden = run()
    for hook in hooks:
        hook.remove()
    for module, weight in zip(modules, kept, strict=True):
        module.weight.copy_(weight)
    return hidden


def _divergence(executor: LayerExecutor, exact: Tensor, hidden: Tensor) -> float:
    total = 0.0
    for own, other in zip(exact, hidden, strict=True):
        p, q = (F.log_softmax(executor.logits(h), -1) for h in (own, other))
        executor.expect_finite(executor.head_name, p)
        total += float(F.kl_div(q, p, reduction="batchmean", log_target=True))
    return total / len(exact)


def _cost(unit: Unit, width: int, wider: int) -> float:
    """Return the additional bits of a wider unit."""
    return unit.weights * (unit.sizes[wider] - unit.sizes[width])


def spend(
    units: list[Unit],
    prices: Mapping[tuple[int, int], float],
    grids: Mapping[int, LinearRecipe | None],
    target_bits: float,
    settled: Settled,
) -> Allocation:
    """Raise widths greedily from the narrowest, which fits; the `settled` Linears count in the target."""
    widths = sorted(grids)
    total = settled.weights + sum(unit.weights for unit in units)
    chosen = dict.fromkeys(range(len(units)), widths[0])

    def price(number: int, width: int) -> float:
        return prices.get((number, width), 0.0)  # an unchanged Linear costs nothing

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
