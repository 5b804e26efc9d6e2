"""Carry the hidden states of all windows through one layer, exact and rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.model.streams import Share, Streams, drift_figures
from qrt_calibrate.recipe.recipe import LinearRecipe
from qrt_calibrate.rounding.fold import linear
from qrt_calibrate.rounding.rtn import on_device
from qrt_calibrate.rounding.search import round_input
from qrt_calibrate.steps.layer import LayerResult


class WindowStates:
    """The hidden states of the token ids `ids` [B, T] in `streams`, and the executor that runs layers."""

    def __init__(self, executor: LayerExecutor, streams: Streams, ids: Tensor) -> None:
        self.executor, self.streams, self.ids = executor, streams, ids

    @torch.no_grad()
    def advance(
        self,
        index: int,
        tensors: Mapping[str, Tensor],
        result: LayerResult,
        grids: Mapping[str, LinearRecipe],
    ) -> None:
        """Run the exact layer and the rounded one.

        `tensors` belong to the exact layer, `result` and `grids` to the rounded one.
        """
        exact = self.executor.load(index, tensors)
        rounded = self.executor.load(index, _stored(result, self.executor.device))
        for name, grid in grids.items():
            if WEIGHT_SCHEMES[grid.scheme].int8_tokens:
                round_input(linear(rounded, name))
        run = self.executor.run

        def advance(share: Share, exact: nn.Module, rounded: nn.Module) -> None:
            share.advance(share.exact, partial(run, index, exact))
            share.advance(share.rounded, partial(run, index, rounded))

        self.streams.each(advance, exact, rounded)

    def drift(self, index: int) -> dict[str, float]:
        """Return the report's figures of how far the rounded states are from the exact ones behind a layer.

        CheckpointError where either are not finite.
        """
        squares = torch.cat(self.streams.each(Share.drift), 1)
        self.executor.expect_finite(self.executor.layer_name(index), squares)
        return drift_figures(squares)

    @torch.no_grad()
    def run_again(self, layers: int, read: Callable[[int], LayerResult]) -> None:
        """Run the windows that evaluate through all `layers` rounded layers again; `read` returns each."""
        for share in self.streams.shares:
            states = self.executor.embed(self.ids[share.numbers[share.calibrating :]])
            share.rounded[share.calibrating :].copy_(states)

        def advance(share: Share, layer: nn.Module, index: int) -> None:
            share.advance(share.rounded, partial(self.executor.run, index, layer), ahead=True)

        for index in range(layers):
            layer = self.executor.load(index, _stored(read(index), self.executor.device))
            self.streams.each(partial(advance, index=index), layer)


def _stored(layer: LayerResult, device: torch.device) -> dict[str, Tensor]:
    """Return a layer's tensors, its quantized weights decoded on `device`."""
    stored = dict(layer.tensors)
    for name, weight in layer.linears.items():
        stored[f"{name}.weight"] = on_device(weight, device).dequantize()
        if weight.bias is not None:
            stored[f"{name}.bias"] = weight.bias
    return stored
