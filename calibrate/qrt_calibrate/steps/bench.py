"""Two copies of a decoder layer, exact and being rounded, and the sample of windows that judges both."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from qrt.arch import Arch
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.model.reference import ATTENTION, blocks
from qrt_calibrate.model.streams import Share, Streams
from qrt_calibrate.recipe.recipe import LinearRecipe
from qrt_calibrate.rounding.observe import input_and_output, inputs_of

Parts = tuple[str, ...]  # names of Linears in a layer
SEARCH_TOKENS = 4096  # tokens that judge candidates of AWQ and SmoothQuant; moments see all tokens


@dataclass(frozen=True)
class Stage:
    """Linears that read one input and are rounded together.

    parts         their names in the layer
    grid          their grid
    in_attention  whether they are part of attention, and not of the mlp
    norm          the norm in front of their block, which reads the residual stream; None: there is none
    out_norm      the norm behind their block, or None
    """

    parts: Parts
    grid: LinearRecipe
    in_attention: bool
    norm: str | None
    out_norm: str | None


def stages(arch: Arch, grids: Mapping[str, LinearRecipe]) -> list[Stage]:
    """Return the stages of a layer in the order they run, those that have a grid."""
    names = arch.names
    attention, mlp = (True, names.attention_in, names.attention_out), (False, names.mlp_in, names.mlp_out)
    return [
        Stage(parts, grids[parts[0]], *(attention if number < 2 else mlp))
        for number, (_, parts) in enumerate(arch.fuse)
        if parts[0] in grids
    ]


class Bench:
    """Two copies of layer `index`, whose stored tensors are `tensors` (names relative to the layer).

    The layer's blocks are worked on one after the other, and the streams go on block by block.

    name      the layer's full name, for messages
    exact     folded but never rounded
    rounded   its Linears are rounded one stage after the other
    block     the block that is worked on; None: the whole layer
    start     [b, T, H] hidden states of the rounded model before the layer
    sample    [b, T, H] what exact blocks before this one make of them
    wanted    [b, T, H] output of the exact block for the sample
    """

    def __init__(
        self,
        name: str,
        arch: Arch,
        eps: float,
        executor: LayerExecutor,
        index: int,
        tensors: Mapping[str, Tensor],
        streams: Streams,
    ) -> None:
        self.name, self.arch, self.eps = name, arch, eps
        self.executor, self.index, self.streams = executor, index, streams
        self._tensors = tensors
        self.exact = executor.load(index, tensors)
        self.rounded = copy.deepcopy(self.exact)
        first, windows = streams.shares[0], max(1, SEARCH_TOKENS // streams.seqlen)
        self.start = first.rounded[: first.calibrating][:windows].to(first.device, copy=True)
        self.blocks, self.wanted = blocks(arch), self.start

    def enter(self, block: int | None) -> None:
        """Go on to the next block, `block`."""
        self.block, self.sample = block, self.wanted
        self.wanted = self.run(self.exact)
        self.executor.expect_finite(self.name, self.wanted)

    def within(self, stages: list[Stage]) -> list[Stage]:
        """Return those of a layer's stages that are in the block."""
        return [own for own in stages if self.block is None or own.in_attention == (self.block == ATTENTION)]

    def leave(self, exact: nn.Module, ahead: bool) -> None:
        """Take the streams through the block, the exact one by `exact`.

        With `ahead` its windows that calibrate are behind the block already.
        """

        def advance(share: Share, exact: nn.Module, rounded: nn.Module) -> None:
            share.advance(share.exact, partial(self.run, exact), ahead)
            share.advance(share.rounded, partial(self.run, rounded))

        self.streams.each(advance, exact, self.rounded)

    def run(self, layer: nn.Module, hidden: Tensor | None = None) -> Tensor:
        """Run the block of a copy of the layer on `hidden`, or on the sample."""
        states = self.sample if hidden is None else hidden
        return self.executor.run(self.index, layer, states, self.block)

    def inputs(self, layer: nn.Module, names: list[str], hidden: Tensor | None = None) -> list[Tensor]:
        """Return the inputs of the submodules `names` of a copy, as `inputs_of` does."""
        return inputs_of(layer, names, lambda: self.run(layer, hidden))

    def through(self, layer: nn.Module, name: str, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input [T, K] of submodule `name` of a copy, and the block's output for `hidden`."""
        return input_and_output(layer, name, lambda: self.run(layer, hidden))

    def store(self, name: str) -> None:
        """Round the parameters of a module of the rounded copy as they will be stored."""
        for part, own in self.rounded.get_submodule(name).named_parameters():
            if (full := f"{name}.{part}") in self._tensors:
                own.copy_(own.to(self._tensors[full].dtype))

    def load(self) -> nn.Module:
        """Return a third copy, as stored."""
        return self.executor.load(self.index, self._tensors)
