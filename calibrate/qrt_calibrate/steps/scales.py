"""Search the channel scales of a stage, fold them into both copies of the layer, and check the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from os.path import commonprefix

import torch
from torch import Tensor

from qrt.arch import Arch
from qrt.arch.base import Smooth
from qrt.definitions.stacks import part_rows
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt_calibrate.recipe.method import Scales
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.fold import Pair, check_unchanged, divided, linear
from qrt_calibrate.rounding.observe import Call, Moments, norm_weights, record_calls
from qrt_calibrate.rounding.search import (
    ColumnCost,
    RoundedCost,
    TokenNoise,
    awq_candidates,
    smooth_candidates,
)
from qrt_calibrate.steps.bench import Bench, Stage
from qrt_calibrate.steps.figures import Figures


class ScaleSearch:
    """The search of scales for the smoothing pairs of one layer.

    pairs      pairs whose source may change
    scales     how candidates are made
    exact      sources whose scales are powers of two
    dtype      dtype of the model, in which scales, norms and biases are stored
    """

    def __init__(
        self,
        bench: Bench,
        pairs: list[Smooth],
        scales: Scales,
        exact: Collection[str],
        dtype: torch.dtype,
    ) -> None:
        self._bench, self._scales, self._exact = bench, scales, exact
        self._pairs = {} if scales is Scales.NONE else {pair.readers[0]: pair for pair in reversed(pairs)}
        self._dtype = dtype
        self._calls: dict[tuple[int | None, str], Call | None] = {}  # of what was asked for last

    def has(self, stage: Stage) -> bool:
        """Whether scales can be folded into the input of `stage`."""
        return stage.parts[0] in self._pairs

    def fold(
        self,
        stage: Stage,
        moments: Moments,
        factor: Factor | None,
        done: dict[str, WeightData],
        figures: Figures,
    ) -> Smooth | None:
        """Search scales for the input of `stage` and fold them; return the pair, or None if nothing changed.

        `moments` follow the fold, and so does the source if it is among the Linears that are `done`. Call
        `check` afterwards.
        """
        bench, smooth = self._bench, self._pairs.get(stage.parts[0])
        if smooth is None or (cost := self._cost(smooth, stage, moments, factor)) is None:
            return None
        rows = None if smooth.part is None else part_rows(bench.arch, smooth.part)
        layers = bench.exact, bench.rounded
        pair, rounded = (Pair(layer, smooth, bench.arch.head_dim, rows) for layer in layers)
        exact = smooth.source in self._exact
        candidates = self._candidates(pair, moments, stage, exact)
        if exact:
            candidates = (
                scales for scales in candidates if self._is_exact(rounded, done.get(smooth.source), scales)
            )
        # the identity comes first, so another must be better
        scales = min(candidates, key=cost(pair))
        figures.note("largest scale", float(scales.max()))
        if (scales == 1).all():
            return None
        for one in (pair, rounded):
            one.fold(scales)
        bench.store(smooth.source)
        if smooth.source in done:  # rounded already: dividing the scales of its rows divides the rows
            done[smooth.source] = _divided(done[smooth.source], scales, pair.rows)
            linear(bench.rounded, smooth.source).weight.copy_(done[smooth.source].dequantize())
        moments.divide(pair.spread(scales))
        return smooth

    def check(self, smooth: Smooth) -> None:
        """Raise QrtError unless the exact layer still computes the same; `smooth` was folded last."""
        bench = self._bench
        check_unchanged(bench.wanted, bench.run(bench.exact), bench.sample, bench.name, smooth)

    def _candidates(self, pair: Pair, moments: Moments, stage: Stage, exact: bool) -> Iterator[Tensor]:
        if self._scales is Scales.SMOOTHQUANT:
            return smooth_candidates(pair, moments.max_abs, exact)
        return awq_candidates(pair, moments.mean_abs, stage.grid.spec, exact)

    def _cost(
        self, smooth: Smooth, stage: Stage, moments: Moments, factor: Factor | None
    ) -> Callable[[Pair], ColumnCost | RoundedCost] | None:
        """Return what judges candidates for a pair; None for an expert that the sample does not reach."""
        bench, grid = self._bench, stage.grid
        if factor is not None and self._scales is Scales.AWQ:
            noise = self._noise(stage, float(moments.hessian.trace()))
            return lambda pair: ColumnCost(pair, factor, grid.spec, noise)
        call = self._call(_block(bench.arch, smooth.readers))
        if call is None:
            return None
        int8_tokens = WEIGHT_SCHEMES[grid.scheme].int8_tokens
        weights = None
        if call.output.shape == bench.sample.shape:
            weights = self._sample_weights(stage, call.output)
        return lambda pair: RoundedCost(pair, call, grid.spec, self._dtype, int8_tokens, weights)

    def _noise(self, stage: Stage, power: float) -> TokenNoise | None:
        """Return what rounding the sample's tokens costs at the input of `stage`; None if they stay."""
        if not WEIGHT_SCHEMES[stage.grid.scheme].int8_tokens:
            return None
        call = self._call(stage.parts[0])
        if call is None:
            return None
        closes = stage.parts[0] not in self._bench.arch.readers
        whole = call.output.shape == self._bench.sample.shape
        weights = self._sample_weights(stage, call.output) if closes and whole else None
        return TokenNoise(call.arguments[0].flatten(0, -2), weights, power)

    def _call(self, block: str) -> Call | None:
        """Return the call of `block` on the sample; those of all experts' Linears are recorded at once."""
        bench = self._bench
        if (bench.block, block) not in self._calls:
            experts = [name for name in bench.arch.projections if bench.arch.is_expert(name)]
            names = experts if block in experts else [block]
            found = record_calls(bench.exact, names, lambda: bench.run(bench.exact))
            self._calls = {(bench.block, name): found.get(name) for name in names}
        return self._calls[bench.block, block]

    def _sample_weights(self, stage: Stage, output: Tensor) -> Tensor:
        """Return [T, 1]: the cost of a squared error in each token of the sample, as the next norm sees it.

        The error is in `output` [b, T, H], that of the stage's block, and then in the stream behind it.
        """
        behind = self._bench.wanted if stage.out_norm is None else output
        return norm_weights(behind.flatten(0, -2), self._bench.eps)

    def _is_exact(self, pair: Pair, source: WeightData | None, scales: Tensor) -> bool:
        """Whether the model dtype holds the source after the fold (fp16 can underflow)."""
        if not pair.is_exact(scales, self._dtype):
            return False
        if source is None or source.scale is None:
            return True
        again = _divided(_divided(source, scales, pair.rows), 1 / scales, pair.rows).scale
        assert again is not None
        return torch.equal(again, source.scale)


def foldable(
    pairs: tuple[Smooth, ...], projections: tuple[str, ...], grids: Mapping[str, object]
) -> list[Smooth]:
    """Return the pairs whose source may change: a norm, or a Linear that is quantized."""
    left_alone = set(projections) - set(grids)
    return [pair for pair in pairs if pair.source not in left_alone]


def _block(arch: Arch, readers: tuple[str, ...]) -> str:
    """Return the module whose output judges scales of `readers`: "" is the layer.

    Readers of the stream are judged by what their block makes of them, others by their own output.
    """
    if readers[0] in arch.readers:
        return ".".join(commonprefix([reader.split(".")[:-1] for reader in readers]))
    return ".".join(commonprefix([reader.split(".") for reader in readers]))


def _divided(data: WeightData, scales: Tensor, rows: Tensor | None) -> WeightData:
    """Divide the rows of a quantized source by `scales`; its codes stay."""
    assert data.scale is not None
    return replace(data, scale=divided(data.scale.float(), scales[:, None], rows).to(data.scale.dtype))
