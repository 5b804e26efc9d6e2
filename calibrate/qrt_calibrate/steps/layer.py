"""Quantize one decoder layer: its fused Linears in the order they run, each searched, folded and rounded.

A Linear is fitted to the inputs that it has in the rounded model, and to the output that it has in the exact
model. Errors of outputs that are added to the residual stream count as the next norm sees them, divided by
the token's size. Otherwise a token with massive activations would hide all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt_calibrate.job.plan import Job
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.model.streams import Streams
from qrt_calibrate.recipe.recipe import LinearRecipe, Recipe
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.fold import linear
from qrt_calibrate.rounding.observe import Moments
from qrt_calibrate.rounding.rtn import for_writer, round_weight, split
from qrt_calibrate.rounding.search import round_input
from qrt_calibrate.steps.bench import Bench, Parts, Stage, stages
from qrt_calibrate.steps.correct import Rounder
from qrt_calibrate.steps.experts import Census, count_tokens, expert_moments
from qrt_calibrate.steps.figures import Figures, errors
from qrt_calibrate.steps.inputs import gradient_moments, stage_moments
from qrt_calibrate.steps.scales import ScaleSearch, foldable
from qrt_calibrate.steps.sensitivity import OutputMoments


@dataclass(frozen=True)
class LayerResult:
    """A finished layer; names are relative to it and tensors lie on the CPU.

    linears   quantized weights with their biases
    tensors   all other tensors, in their stored dtype
    figures   figures for the report, by column title
    """

    linears: dict[str, WeightData]
    tensors: dict[str, Tensor]
    figures: dict[str, float]


def quantize_layer(
    job: Job,
    index: int,
    tensors: Mapping[str, Tensor],
    executor: LayerExecutor | None,
    streams: Streams | None,
) -> LayerResult:
    """Round every Linear of layer `index` that has a grid.

    `tensors` are the layer's as stored, named relative to it. A method that needs text also needs `executor`
    and `streams`, which it takes through the layer.
    """
    grids = job.layer_grids(index)
    if not job.recipe.rules.needs_text:
        return round_to_nearest(tensors, grids, job.scale_dtype, job.device)
    assert executor is not None and streams is not None
    with torch.no_grad():
        eps = job.arch.norm.eps
        arch = job.arch.at(index)
        bench = Bench(job.layer_name(index), arch, eps, executor, index, tensors, streams)
        pairs = foldable(arch.smooth, arch.projections, grids)
        figures, recipe, dtype = Figures(), job.recipe, job.scale_dtype
        # a progressive source takes only scales that leave its channels' scales exact
        steps = {name for name, grid in grids.items() if grid.spec.progressive}
        exact = {pair.source for pair in pairs if recipe.exact_folds or pair.source in steps}
        search = ScaleSearch(bench, pairs, recipe.rules.scales, exact, dtype)
        rounder = Rounder(recipe.rules, dtype, recipe.damping, figures)
        done = LayerWork(bench, search, rounder, figures, recipe).quantize(grids)
        return LayerResult(
            _finished(bench, done, tensors),
            _remaining(bench, grids, tensors),
            {**errors(bench, grids, dtype), **figures.notes},
        )


class LayerWork:
    """The stages of one layer, each measured, folded and rounded."""

    def __init__(
        self, bench: Bench, search: ScaleSearch, rounder: Rounder, figures: Figures, recipe: Recipe
    ) -> None:
        self._bench, self._search, self._rounder, self._figures = bench, search, rounder, figures
        self._all_experts = recipe.moe_calibrate_all_experts
        self._exact_folds = recipe.exact_folds  # the folded exact copy computes the same bits
        self._done: dict[str, WeightData] = {}

    def quantize(self, grids: Mapping[str, LinearRecipe]) -> dict[str, WeightData]:
        """Round the Linears that have a grid, in the order they run."""
        bench, arch = self._bench, self._bench.arch
        found = stages(arch, grids)
        # an expert's outputs have gradients only from the tokens sent to it
        shared = [stage.parts for stage in found if not arch.is_expert(stage.parts[0])]
        gradients = gradient_moments(bench, shared)
        for block in bench.blocks:
            bench.enter(block)
            census, ahead = None, False
            for stage in (own := bench.within(found)):
                if arch.is_expert(stage.parts[0]):
                    census = census or count_tokens(bench, self._all_experts)
                    self._quantize_experts(stage, census)
                else:
                    ahead = self._exact_folds and stage is own[-1]
                    felt = gradients.pop(stage.parts, None)
                    self._quantize_stage(stage, stage_moments(bench, stage, ahead), felt)
            if census is not None:
                self._figures.notes |= census.figures()
            bench.leave(bench.exact if self._exact_folds else bench.load(), ahead)
        return self._done

    def _quantize_experts(self, stage: Stage, census: Census) -> None:
        """Fold and round the Linears of all experts, each by the tokens that count for it."""
        bench, done, figures = self._bench, self._done, self._figures
        reads = stage.parts[0] in bench.arch.readers
        if reads and census.every:  # one input for all of them
            return self._quantize_stage(stage, stage_moments(bench, stage), None)
        if reads and self._search.has(stage):
            moments = stage_moments(bench, stage)
            if smooth := self._search.fold(stage, moments, self._rounder.factor(moments), done, figures):
                self._search.check(smooth)
            del moments
        for some, inputs in expert_moments(bench, stage, census):
            self._quantize_some(stage, some, inputs, fold=not reads)
            del inputs  # before those of the next experts are measured

    def _quantize_some(
        self, stage: Stage, some: Sequence[Parts], inputs: Sequence[Moments], fold: bool
    ) -> None:
        """Round the Linears `some`, one item for each expert, whose inputs have the moments `inputs`.

        With `fold` each expert's scales are searched and folded first.
        """
        self._expect_finite(stage.parts, inputs)
        factors, folded = [], None
        for parts, own in zip(some, inputs, strict=True):
            factor = self._rounder.factor(own)
            one = replace(stage, parts=parts)
            if fold and (smooth := self._search.fold(one, own, factor, self._done, self._figures)):
                factor, folded = self._rounder.factor(own), smooth
            factors.append(factor)
        if folded is not None:
            self._search.check(folded)
        weights = (self._weight(parts) for parts in some)
        data = self._rounder.round_each(weights, inputs, factors, stage.grid)
        for parts, own_data, factor in zip(some, data, factors, strict=True):
            self._keep(replace(stage, parts=parts), own_data, factor)

    def _quantize_stage(self, stage: Stage, moments: Moments, gradients: OutputMoments | None) -> None:
        """Fold and round the Linears of `stage`, whose input has `moments`."""
        self._expect_finite(stage.parts, [moments])
        factor = self._rounder.factor(moments)
        if smooth := self._search.fold(stage, moments, factor, self._done, self._figures):
            self._search.check(smooth)
            factor = self._rounder.factor(moments)  # H became D^-1 H D^-1, which has another order
        data = self._rounder.round(self._weight(stage.parts), moments, factor, gradients, stage.grid)
        self._keep(stage, data, factor)

    def _expect_finite(self, parts: Parts, inputs: Sequence[Moments]) -> None:
        """Raise CheckpointError for inputs of the Linears `parts` that are not finite."""
        bench = self._bench
        sizes = torch.stack([own.mean_abs.sum() for own in inputs])
        bench.executor.expect_finite(f"{bench.name}, in front of {parts[0]}", sizes)

    def _weight(self, parts: Parts) -> Tensor:
        """Return the stacked weights of `parts`."""
        return torch.cat([linear(self._bench.rounded, part).weight for part in parts])

    def _keep(self, stage: Stage, data: WeightData, factor: Factor | None) -> None:
        """Note the rounded Linears of `stage`, and put their values into the rounded copy."""
        rounded = self._bench.rounded
        rows = [linear(rounded, part).out_features for part in stage.parts]
        for part, own in zip(stage.parts, split(data, rows), strict=True):
            self._done[part] = own
            linear(rounded, part).weight.copy_(own.dequantize())
            if WEIGHT_SCHEMES[stage.grid.scheme].int8_tokens:
                round_input(linear(rounded, part))
        self._figures.note("damping", factor.damping if factor else 0.0)


def round_to_nearest(
    tensors: Mapping[str, Tensor], grids: Mapping[str, LinearRecipe], dtype: torch.dtype, device: torch.device
) -> LayerResult:
    """Round a layer's Linears to nearest, one after the other, without activations."""
    wrong = size = 0.0
    done = {}
    weights = {f"{name}.weight" for name in grids}
    rest = {name: own.cpu() for name, own in tensors.items() if name not in weights}
    for name, grid in grids.items():
        weight = tensors[f"{name}.weight"].to(device, torch.float32)
        data = round_weight(weight, grid.spec, dtype)
        wrong += float((data.dequantize() - weight).square().sum())
        size += float(weight.square().sum())
        done[name] = for_writer(data, rest.pop(f"{name}.bias", None))
    return LayerResult(done, rest, {"weight error": (wrong / size) ** 0.5 if size else 0.0})


def _finished(
    bench: Bench, done: Mapping[str, WeightData], tensors: Mapping[str, Tensor]
) -> dict[str, WeightData]:
    """Give the quantized Linears their biases: as folded, or the zeros stored for them."""
    found = {}
    for name, weight in done.items():
        bias, stored = linear(bench.rounded, name).bias, tensors.get(f"{name}.bias")
        if bias is not None and stored is not None:
            stored = bias.to("cpu", stored.dtype)
        found[name] = for_writer(weight, stored)
    return found


def _remaining(
    bench: Bench, grids: Mapping[str, LinearRecipe], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the layer's other stored tensors, as folded: those that belong to no quantized Linear."""
    own = {f"{name}.{part}" for name in grids for part in ("weight", "bias")}
    now = bench.rounded.state_dict()
    return {
        name: now.get(name, tensor).to("cpu", tensor.dtype)
        for name, tensor in tensors.items()
        if name not in own
    }
