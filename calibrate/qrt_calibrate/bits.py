"""Bits under a budget: what each fused Linear of each layer costs at each width, and which to spend bits on.

One sweep over the layers measures them all: for every fused Linear and every width a stream of hidden states
sets out, in which that Linear alone is rounded, and travels on through exact layers beside the others. Behind
the last layer its KL divergence from the exact model is the price of that choice. Then the cheapest widths
are raised one after the other, each time where a byte saves most KL, until the budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from qrt.errors import ConfigError
from qrt.quant.weight import WEIGHT_ONLY
from qrt_calibrate.decoder import Decoder
from qrt_calibrate.fold import linear
from qrt_calibrate.plan import Job, ReadLayer
from qrt_calibrate.preflight import bits_of, output_bytes
from qrt_calibrate.recipe import Grid, Override, grid_of
from qrt_calibrate.rtn import round_weight

WINDOWS = 4  # that measure; hidden states of all candidates are kept
SIXTEEN = 16


@dataclass(frozen=True)
class Unit:
    """A fused Linear: the full names of its parts, and its weights."""

    parts: tuple[str, ...]
    weights: int


@dataclass(frozen=True)
class Point:
    """One step of the trade-off: bits per weight on disk, the KL expected, and what was raised."""

    bits: float
    kl: float
    change: str


@dataclass(frozen=True)
class Allocation:
    """The widths chosen, as overrides of the recipe's grid, and the way there."""

    overrides: tuple[Override, ...]
    curve: tuple[Point, ...]


def allocate(job: Job, windows: Tensor, read_layer: ReadLayer) -> Allocation:
    """Widths of 4, 8 or 16 bits within the recipe's target_bits or max_size, scales and zeros counted.

    windows   token ids [B, T] that measure
    """
    grids: dict[int, Grid | None] = {bits: _grid(job, bits) for bits in WEIGHT_ONLY} | {SIXTEEN: None}
    units = _units(job)
    sizes = {
        bits: bits_of(grid, job.config.hidden_size, job.scale_dtype.itemsize) if grid else float(SIXTEEN)
        for bits, grid in grids.items()
    }
    target_bits = job.recipe.target_bits
    if target_bits is None:
        target_bits = _bits_within(job, units, min(sizes.values()))
    prices = measure(job, units, {bits: grid for bits, grid in grids.items() if grid}, windows, read_layer)
    return spend(units, prices, sizes, grids, target_bits)


def _bits_within(job: Job, units: list[Unit], narrowest: float) -> float:
    """Bits per weight that max_size leaves for the units; ConfigError when that is less than `narrowest`."""
    assert job.recipe.max_size is not None
    own = bits_of(job.recipe.grid, job.config.hidden_size, job.scale_dtype.itemsize)
    weights = sum(unit.weights for unit in units)
    rest = output_bytes(job) - weights * own / 8
    target_bits = 8 * (job.recipe.max_size * 1e9 - rest) / weights
    if target_bits < narrowest:
        raise ConfigError(
            f"--max-size: got {job.recipe.max_size} GB, but the tensors take "
            f"{(rest + weights * narrowest / 8) / 1e9:.4g} GB where all Linears are at their narrowest"
        )
    return target_bits


def _grid(job: Job, bits: int) -> Grid:
    """The recipe's own grid at its own width; at others its group size and symmetry in the other scheme."""
    own = job.recipe.grid
    if own.spec.bits == bits:
        return own
    symmetric = own.spec.symmetric if bits == min(WEIGHT_ONLY) else True
    return Grid(WEIGHT_ONLY[bits], grid_of(WEIGHT_ONLY[bits], own.spec.group_size or -1, symmetric))


def _units(job: Job) -> list[Unit]:
    units = []
    for index in range(job.config.num_layers):
        for _, names in job.arch.fuse:
            parts = tuple(f"{job.layer_name(index)}.{name}" for name in names)
            if job.grids[parts[0]] == job.recipe.grid:  # an override has settled the others
                shapes = [job.checkpoint.spec(f"{part}.weight").shape for part in parts]
                units.append(Unit(parts, sum(prod(shape) for shape in shapes)))
    return units


@torch.no_grad()
def measure(
    job: Job, units: list[Unit], grids: Mapping[int, Grid], windows: Tensor, read_layer: ReadLayer
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
    """What `run` gives while `parts` of `layer` are rounded to nearest."""
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


def spend(
    units: list[Unit],
    prices: Mapping[tuple[int, int], float],
    sizes: Mapping[int, float],
    grids: Mapping[int, Grid | None],
    target_bits: float,
) -> Allocation:
    """Raise widths greedily; ConfigError where even the narrowest do not fit."""
    widths = sorted(sizes)
    total = sum(unit.weights for unit in units)
    chosen = dict.fromkeys(range(len(units)), widths[0])

    def price(number: int, width: int) -> float:
        return prices.get((number, width), 0.0)  # 16 bits are exact

    def average() -> float:
        return sum(units[number].weights * sizes[width] for number, width in chosen.items()) / total

    if average() > target_bits:
        raise ConfigError(
            f"--target-bits: got {target_bits}, the narrowest grid takes {average():.3f} bits per weight"
        )
    curve = [Point(average(), sum(price(*pair) for pair in chosen.items()), f"all at {widths[0]} bits")]
    while True:
        room = (target_bits - average()) * total
        moves = [
            ((price(number, width) - price(number, wider)) / cost, number, wider)
            for number, width in chosen.items()
            for wider in widths
            if wider > width
            and (cost := units[number].weights * (sizes[wider] - sizes[width])) <= room + 1e-6
        ]
        worth = [move for move in moves if move[0] > 0]
        if not worth:
            break
        _, number, wider = max(worth, key=lambda move: (move[0], -move[1], -move[2]))
        chosen[number] = wider
        change = f"{', '.join(units[number].parts)} to {wider} bits"
        curve.append(Point(average(), sum(price(*pair) for pair in chosen.items()), change))
    overrides = [
        Override(part, grids[width]) for number, width in chosen.items() for part in units[number].parts
    ]
    return Allocation(tuple(overrides), tuple(curve))
