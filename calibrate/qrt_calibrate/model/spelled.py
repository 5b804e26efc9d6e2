"""A checkpoint whose experts are stored one by one, although it stacks them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qrt.arch import Arch
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.checkpoint.format import shape_of
from qrt.quant.spec import TensorSpec
from qrt_calibrate.model.decoded import expect_floats, plain

BIAS = ".bias"


@dataclass(frozen=True)
class _Slice:
    """Where a tensor of one expert lies: `rows` of entry `expert` of `stored`, whose entries have `spec`."""

    stored: str
    expert: int
    rows: slice
    spec: TensorSpec


class SpelledCheckpoint(Checkpoint):
    """A view of `base` that names every expert's tensors, as a calibrated checkpoint stores them.

    Codes are the weights that they mean, in the model's dtype.
    """

    def __init__(self, base: Checkpoint, arch: Arch) -> None:
        self.path, self.quantization, self.config, self.base = base.path, base.quantization, base.config, base
        spec = arch.experts
        assert spec is not None and spec.stacked is not None
        self.entry, self._transposed = base.entry, bool(spec.stacked.transposed)
        layers = [f"{arch.names.layers}.{i}." for i in range(arch.num_layers) if arch.layers[i].sparse]
        held = {f"{layer}{name}": _held(base, f"{layer}{name}") for layer in layers for name in spec.stored}
        specs = {stack: self._entry_of(stack, getattr(torch, arch.dtype)) for stack in held}
        self._slices = {name: part for layer in layers for name, part in _slices(base, arch, layer, specs)}
        stacked = {name for names in held.values() for name in names}
        self._shard_of = {name: base.shard(name) for name in base.stored_names() if name not in stacked}
        shards = {stack: base.shard(names[0]) for stack, names in held.items()}
        self._shard_of |= {name: shards[own.stored] for name, own in self._slices.items()}
        self._last: tuple[tuple[str, int], Tensor] | None = None  # gate and up are read one after the other

    def _entry_of(self, stack: str, dtype: torch.dtype) -> TensorSpec:
        """Return shape and dtype of the weight of each of the experts `stack`: [N, K]."""
        one = self.base.stack(stack)
        kind, shape = expect_floats(one, one.module), shape_of(one, one.module)
        if kind is None:
            dtype = one.spec(f"{one.module}.weight").dtype
        turned = self._transposed and one.has(f"{one.module}.weight")  # packed codes never are
        return TensorSpec(shape[::-1] if turned else shape, dtype)

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of a tensor."""
        own = self._slices.get(name)
        if own is None:
            return self.base.spec(name)
        rows = len(range(*own.rows.indices(own.spec.shape[0])))
        shape = (rows,) if name.endswith(BIAS) else (rows, *own.spec.shape[1:])
        return replace(own.spec, shape=shape)

    def tensor(self, name: str, *checks: Any, **sizes: Any) -> Tensor:
        """Return the tensor, as stored or as its codes mean."""
        own = self._slices.get(name)
        if own is None:
            return self.base.tensor(name, *checks, **sizes)
        if name.endswith(BIAS):
            return self.base.tensor(f"{own.stored}_bias")[own.expert][own.rows]
        if self._last is None or self._last[0] != (own.stored, own.expert):
            _, weight = self.base.expert(own.stored, own.expert, transposed=self._transposed)
            self._last = (own.stored, own.expert), plain(self.path, name, weight, own.spec.dtype)
        return self._last[1][own.rows]


def spelled_out(checkpoint: Checkpoint, arch: Arch) -> tuple[Checkpoint, Arch]:
    """Return the checkpoint and its architecture with experts that are stored one by one."""
    if arch.experts is None or arch.experts.stacked is None:
        return checkpoint, arch
    return SpelledCheckpoint(checkpoint, arch), replace(arch, experts=replace(arch.experts, stacked=None))


def _held(base: Checkpoint, stack: str) -> list[str]:
    """Return the names of the tensors that hold the experts `stack`."""
    one = base.stack(stack)
    return [one.name_in_messages(name) for name in one.names()]


def _slices(
    base: Checkpoint, arch: Arch, layer: str, specs: dict[str, TensorSpec]
) -> list[tuple[str, _Slice]]:
    """Return where the tensors of each expert of a layer lie, by their names."""
    spec, found = arch.experts, []
    assert spec is not None and spec.stacked is not None
    pairs, (gate_up, down) = spec.stacked.pairs, spec.stored
    gate = slice(0, None, 2) if pairs else slice(0, spec.width)
    up = slice(1, None, 2) if pairs else slice(spec.width, None)
    for name, parts in ((gate_up, {0: gate, 1: up}), (down, {2: slice(None)})):
        stored = f"{layer}{name}"
        bias = None
        if base.has(f"{stored}_bias"):
            bias = replace(specs[stored], dtype=base.spec(f"{stored}_bias").dtype)
        for number in range(spec.count):
            for part, rows in parts.items():
                own = f"{layer}{spec.each(number)[part]}"
                found.append((f"{own}.weight", _Slice(stored, number, rows, specs[stored])))
                if bias is not None:
                    found.append((f"{own}{BIAS}", _Slice(stored, number, rows, bias)))
    return found
