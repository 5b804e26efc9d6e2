"""Two copies of a decoder layer, exact and being rounded, and the sample of windows that judges both."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from qrt.arch import Arch
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.model.streams import Streams
from qrt_calibrate.recipe.recipe import Grid
from qrt_calibrate.rounding.observe import inputs_of

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
    grid: Grid
    in_attention: bool
    norm: str | None
    out_norm: str | None


def stages(arch: Arch, grids: Mapping[str, Grid]) -> list[Stage]:
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

    name      the layer's full name, for messages
    exact     folded but never rounded
    rounded   its Linears are rounded one stage after the other
    sample    [b, T, H] hidden states of the rounded model before the layer
    wanted    [b, T, H] output of the exact layer for them
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
        self.sample = first.rounded[: first.calibrating][:windows].to(first.device)
        self.wanted = self.run(self.exact)

    def run(self, layer: nn.Module, hidden: Tensor | None = None) -> Tensor:
        """Run a copy of the layer on `hidden`, or on the sample."""
        return self.executor.run(self.index, layer, self.sample if hidden is None else hidden)

    def inputs(self, layer: nn.Module, names: list[str], hidden: Tensor | None = None) -> list[Tensor]:
        """Return the inputs of the submodules `names` of a copy, as `inputs_of` does."""
        return inputs_of(layer, names, lambda: self.run(layer, hidden))

    def load(self) -> nn.Module:
        """Return a third copy, as stored."""
        return self.executor.load(self.index, self._tensors)
