"""Write a quantized checkpoint in compressed-tensors, part by part; the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from qrt.errors import UnsupportedError
from qrt.quant import progressive
from qrt.quant.checkpoint.compressed_tensors import quantization_config, target_of
from qrt.quant.checkpoint.config_group import layout_of
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.making.output import OutputFolder
from qrt.quant.checkpoint.reader import Checkpoint
from qrt.quant.spec import QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData


class CheckpointWriter:
    """A context manager; `out` appears, whole, when its block ends without an exception.

    with CheckpointWriter(out, source, grid=("w4a16", spec), ignore=["lm_head"], metadata={}) as writer:
        writer.add_linear("model.layers.0.mlp.up_proj", weight)
        writer.add_tensor("model.norm.weight", tensor)

    Add every tensor of `source`: as it is, as a fold changed it, or as part of its quantized Linear. Tensors
    stay in memory until a part is full, so do not change one after adding it. The parts lie in
    `<out>.partial...` beside `out`. At the end they are copied tensor by tensor into shards of at most
    `max_shard_bytes`; the tensors of a Linear share a shard. An exception removes the parts. With a `plan`
    the steps that `finish_step` has ended stay, and a writer with the same plan continues from there.

    grid           scheme and grid of the Linears added
    overrides      Linears with another scheme and grid, by module name
    ignore         targets that stay unquantized: module names, "re:<regex>"
    metadata       qrt's own facts, JSON values, under quantization_config["qrt"]
    plan           everything that decides the bytes, JSON values

    Raises ConfigError when `out` exists and is not an empty folder, UnsupportedError for a scheme or grid
    without a layout, CheckpointError when the disk refuses.
    """

    def __init__(
        self,
        out: Path,
        source: Checkpoint,
        *,
        grid: tuple[str, QuantSpec],
        ignore: Sequence[str],
        metadata: Mapping[str, Any],
        overrides: Mapping[str, tuple[str, QuantSpec]] | None = None,
        plan: Mapping[str, Any] | None = None,
        max_shard_bytes: int = 5_000_000_000,
    ) -> None:
        if source.quantization:
            raise UnsupportedError(f"{source.path}: already quantized; start from the unquantized model")
        self._overrides = dict(overrides or {})
        for scheme, spec in {grid, *self._overrides.values()}:
            layout, usual = layout_of(scheme), WEIGHT_SCHEMES[scheme].spec
            alike = usual is not None and (usual.bits, usual.progressive) == (spec.bits, spec.progressive)
            if not alike or not layout.holds(spec):
                raise UnsupportedError(f"weight scheme {scheme!r} does not store {spec}")
        self._default = grid
        self._ignore = tuple(ignore)
        self._metadata = metadata
        dtype = source.config.get("dtype") or source.config.get("torch_dtype")
        self._dtype = getattr(torch, str(dtype), None)  # loaders cast every scale to the model's dtype
        self._linears: set[str] = set()
        self._folder = OutputFolder(out, source, plan, max_shard_bytes)

    def __enter__(self) -> CheckpointWriter:
        self._folder.begin()
        for name in self._folder.names():
            module, _, kind = name.rpartition(".")
            if kind in ("weight_packed", "weight_scale"):
                self._linears.add(module)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return self._folder.abandon()
        modules = sorted(self._linears)
        config = quantization_config(*self._default, self._ignore, self._metadata, self._overrides, modules)
        self._folder.publish(config, {f"{module}.weight" for module in modules})

    @property
    def finished(self) -> list[str]:
        """The steps that an earlier run with the same plan has finished."""
        return self._folder.parts.labels

    def notes(self, label: str) -> Mapping[str, Any]:
        """Return the notes of a finished step."""
        return self._folder.parts.notes(label)

    def read_linear(self, label: str, module: str) -> WeightData:
        """Read back a Linear that a finished step added."""
        scheme, spec = self._grid_of(module)
        return layout_of(scheme).decode(self._folder.parts.step(label), module, spec)

    def read_tensor(self, label: str, name: str) -> Tensor:
        """Read an unquantized tensor of a finished step."""
        return self._folder.parts.step(label).tensor(name)

    @property
    def stored(self) -> TensorFolder:
        """The tensors that the finished steps have written."""
        return self._folder.parts.tensors()

    @property
    def working_folder(self) -> Path:
        """Folder where other files may lie until the block ends."""
        return self._folder.parts.path

    def _grid_of(self, module: str) -> tuple[str, QuantSpec]:
        return self._overrides.get(module, self._default)

    def add_linear(self, module: str, weight: WeightData, again: bool = False) -> None:
        """Add a quantized Linear, such as "model.layers.0.mlp.up_proj", on its grid, with its bias.

        `again` replaces the one that an earlier step added. UnsupportedError where the grid's groups are
        progressive and these are not.
        """
        assert weight.scale is not None and weight.perm is None, f"{module}: not quantized, or permuted"
        scheme, spec = self._grid_of(module)
        grid = (weight.bits, weight.zero is None, weight.scale.shape[1])
        groups = weight.in_features // spec.group_of(weight.in_features)
        expected = (spec.bits, spec.symmetric, groups)
        assert grid == expected, f"{module}: expected (bits, symmetric, groups) {expected}, got {grid}"
        assert self._dtype in (None, weight.scale.dtype), (
            f"{module}: scale {weight.scale.dtype}, model {self._dtype}"
        )
        assert target_of(module, self._ignore) is None, f"{module} is on the ignore list"
        if spec.progressive:
            progressive.split(weight.scale, weight.zero)  # raises where it is not
        tensors = layout_of(scheme).encode(weight)
        if weight.bias is not None:
            tensors["bias"] = weight.bias
        self._folder.add({f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}, again)
        self._linears.add(module)

    def add_tensor(self, name: str, tensor: Tensor, again: bool = False) -> None:
        """Add an unquantized tensor; `again` replaces the one of an earlier step.

        An lm_head that only repeats its tied embedding is left out.
        """
        self._folder.add({name: tensor}, again)

    def add_file(self, name: str, content: str) -> None:
        """Add a text file to the folder."""
        self._folder.files[name] = content

    def finish_step(self, label: str, notes: Mapping[str, Any]) -> None:
        """End a step: everything added since the last one survives when the process ends."""
        self._folder.finish_step(label, notes)
