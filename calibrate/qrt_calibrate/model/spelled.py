"""A checkpoint whose experts are stored one by one, although it stacks them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from qrt.arch import Arch
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.spec import TensorSpec


@dataclass(frozen=True)
class _Slice:
    """Where a tensor of one expert lies: rows `begin::step` up to `end` of entry `expert` of `stored`."""

    stored: str
    expert: int
    rows: slice
    transposed: bool

    def of(self, whole: Tensor) -> Tensor:
        """Return it, given the stored tensor."""
        own = whole[self.expert]
        return (own.T if self.transposed else own)[self.rows]


class SpelledCheckpoint(Checkpoint):
    """A view of `base` that names every expert's tensors, as a calibrated checkpoint stores them."""

    def __init__(self, base: Checkpoint, arch: Arch) -> None:
        self.path, self.quantization, self.config, self.base = base.path, base.quantization, base.config, base
        self._slices = _slices(base, arch)
        stacked = {own.stored for own in self._slices.values()}
        self._shard_of = {name: base.shard(name) for name in base.stored_names() if name not in stacked}
        self._shard_of |= {name: base.shard(own.stored) for name, own in self._slices.items()}

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of a tensor."""
        own = self._slices.get(name)
        if own is None:
            return self.base.spec(name)
        stored = self.base.spec(own.stored)
        *_, last = shape = stored.shape[:0:-1] if own.transposed else stored.shape[1:]
        rows = len(range(*own.rows.indices(shape[0])))
        return replace(stored, shape=(rows,) if len(shape) == 1 else (rows, last))

    def tensor(self, name: str, *checks: Any, **sizes: Any) -> Tensor:
        """Return the tensor, as stored."""
        own = self._slices.get(name)
        return (
            self.base.tensor(name, *checks, **sizes) if own is None else own.of(self.base.tensor(own.stored))
        )


def spelled_out(checkpoint: Checkpoint, arch: Arch) -> tuple[Checkpoint, Arch]:
    """Return the checkpoint and its architecture with experts that are stored one by one."""
    if arch.experts is None or arch.experts.stacked is None:
        return checkpoint, arch
    return SpelledCheckpoint(checkpoint, arch), replace(arch, experts=replace(arch.experts, stacked=None))


def _slices(base: Checkpoint, arch: Arch) -> dict[str, _Slice]:
    """Return where each expert's tensors lie, by their names."""
    spec = arch.experts
    assert spec is not None and spec.stacked is not None
    own, found = spec.stacked, {}
    gate = slice(0, None, 2) if own.pairs else slice(0, spec.width)
    up = slice(1, None, 2) if own.pairs else slice(spec.width, None)
    gate_up, down = spec.stored
    places = (gate_up, gate), (gate_up, up), (down, slice(None))
    for index in range(arch.num_layers):
        if not arch.layers[index].sparse:
            continue
        layer = f"{arch.names.layers}.{index}."
        for number in range(spec.count):
            for part, (name, rows) in zip(spec.each(number), places, strict=True):
                stored = f"{layer}{name}"
                found[f"{layer}{part}.weight"] = _Slice(stored, number, rows, bool(own.transposed))
                if base.has(bias := f"{stored}_bias"):
                    found[f"{layer}{part}.bias"] = _Slice(bias, number, rows, False)
    return found
