"""Write a quantized checkpoint: compressed-tensors, part by part, the same bytes every time."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from qrt.errors import CheckpointError, ConfigError, UnsupportedError
from qrt.folder import COPIED, INDEX, SINGLE
from qrt.quant.checkpoint.compressed_tensors import quantization_config, stored_as, target_of
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.parts import Parts
from qrt.quant.checkpoint.reader import Checkpoint
from qrt.quant.checkpoint.shard import write_shard
from qrt.quant.spec import QuantSpec
from qrt.quant.weight.base import WeightData

logger = logging.getLogger(__name__)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PART_BYTES = 256 << 20  # tensors kept in memory before they go to disk


class CheckpointWriter:
    """A context manager; `out` appears, whole, when its block ends without an exception.

    with CheckpointWriter(out, source, scheme="w4a16", spec=spec, ignore=["lm_head"], metadata={}) as writer:
        writer.add_linear("model.layers.0.mlp.up_proj", weight)
        writer.add_tensor("model.norm.weight", tensor)

    Every tensor of `source` must be added: as it is (or changed by a fold), or as the Linear it belongs to.
    Tensors are kept until a part is full, so do not change one after adding it. The parts lie in
    `<out>.partial...` beside `out`; at the end they are copied into shards of at most `max_shard_bytes` (a
    Linear's tensors share a shard), tensor by tensor. An exception removes them, unless a `plan` is given:
    then what `finish_step` has ended stays, and a writer with the same plan goes on from there.

    scheme, spec   of the Linears added; `spec` is the grid that their weights must have
    overrides      Linears with another scheme and grid, by module name
    ignore         targets that stay unquantized: module names, "re:<regex>"
    metadata       qrt's own facts, JSON values, under quantization_config["qrt"]
    plan           all that decides the bytes, JSON values

    Raises ConfigError when `out` is there and not an empty folder, UnsupportedError for a scheme or grid
    without a layout, CheckpointError when the disk refuses.
    """

    def __init__(
        self,
        out: Path,
        source: Checkpoint,
        *,
        scheme: str,
        spec: QuantSpec,
        ignore: Sequence[str],
        metadata: Mapping[str, Any],
        overrides: Mapping[str, tuple[str, QuantSpec]] | None = None,
        plan: Mapping[str, Any] | None = None,
        max_shard_bytes: int = 5_000_000_000,
    ) -> None:
        if source.quantization:
            raise UnsupportedError(f"{source.path}: already quantized; start from the unquantized model")
        self._overrides = dict(overrides or {})
        for name, grid in {(scheme, spec), *self._overrides.values()}:
            if stored_as(name).bits != grid.bits or not stored_as(name).layout.holds(grid):
                raise UnsupportedError(f"weight scheme {name!r} does not store {grid}")
        self._default = (scheme, spec)
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
        """Read a Linear of a finished step, as it was added."""
        scheme, spec = self._grid_of(module)
        return stored_as(scheme).layout.decode(self._folder.parts.step(label), module, spec)

    def read_tensor(self, label: str, name: str) -> Tensor:
        """Read an unquantized tensor of a finished step."""
        return self._folder.parts.step(label).tensor(name)

    @property
    def stored(self) -> TensorFolder:
        """What the finished steps have written."""
        return self._folder.parts.tensors()

    @property
    def working_folder(self) -> Path:
        """Where other files may lie until the block ends."""
        return self._folder.parts.path

    def _grid_of(self, module: str) -> tuple[str, QuantSpec]:
        return self._overrides.get(module, self._default)

    def add_linear(self, module: str, weight: WeightData, again: bool = False) -> None:
        """Add a quantized Linear, e.g. "model.layers.0.mlp.up_proj", on its grid, with its bias.

        With `again` it replaces the one that an earlier step has added.
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
        tensors = stored_as(scheme).layout.encode(weight)
        if weight.bias is not None:
            tensors["bias"] = weight.bias
        self._folder.add({f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}, again)
        self._linears.add(module)

    def add_tensor(self, name: str, tensor: Tensor, again: bool = False) -> None:
        """Add an unquantized tensor; with `again` it replaces the one of an earlier step.

        An lm_head that merely repeats its tied embedding is left out.
        """
        self._folder.add({name: tensor}, again)

    def add_file(self, name: str, content: str) -> None:
        """Add a text file to the folder."""
        self._folder.files[name] = content

    def finish_step(self, label: str, notes: Mapping[str, Any]) -> None:
        """Everything added since the step before is done, and stays if the process ends here."""
        self._folder.finish_step(label, notes)


class OutputFolder:
    """A checkpoint folder in the making: tensors into parts, parts into shards, and the source's other files.

    parts    what is on disk so far
    files    further text files to write, by name
    """

    def __init__(
        self, out: Path, source: Checkpoint, plan: Mapping[str, Any] | None, max_shard_bytes: int
    ) -> None:
        out = out.resolve()
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(
                f"{out}: already there and not an empty folder; remove it or choose another one"
            )
        suffix = "partial" if plan is not None else f"partial-{secrets.token_hex(4)}"
        self.parts = Parts(out.with_name(f"{out.name}.{suffix}"), plan)
        self.files: dict[str, str] = {}
        self._out, self._source, self._max_shard_bytes = out, source, max_shard_bytes
        self._part: dict[str, Tensor] = {}  # being filled
        self._added: set[str] = set()
        self._left_out = {HEAD} if _head_is_copy(source) else set()

    def begin(self) -> None:
        """Make the working folder, or take up an earlier one."""
        self.parts.begin()
        self._added = set(self.names())

    def names(self) -> list[str]:
        """Names of the tensors on disk."""
        return self.parts.tensors().names()

    def add(self, tensors: Mapping[str, Tensor], again: bool = False) -> None:
        """Add tensors, but for a head that repeats the embedding; `again` in place of an earlier step's."""
        twice = tensors.keys() & self._added
        assert again or not twice, f"added twice: {sorted(twice)}"
        self._part |= {name: t.detach().cpu() for name, t in tensors.items() if name not in self._left_out}
        self._added |= tensors.keys()
        if sum(tensor.nbytes for tensor in self._part.values()) > PART_BYTES:
            self._flush()

    def finish_step(self, label: str, notes: Mapping[str, Any]) -> None:
        """Everything added so far is on disk, and stays."""
        self._flush()
        self.parts.finish(label, notes)

    def _flush(self) -> None:
        if self._part:
            self.parts.save(self._part)
        self._part = {}

    def abandon(self) -> None:
        """After an exception: keep the finished steps, if there are any."""
        if self.parts.labels:
            logger.warning(
                "finished steps are kept in %s: the same command goes on from there", self.parts.path
            )
        else:
            self.parts.remove()
        self.parts.close()

    def publish(self, quantization: Mapping[str, Any], replaced: set[str]) -> None:
        """Copy the parts into shards, add the other files, and move the folder into place.

        `replaced` are the tensors of the source in whose place others are written.
        """
        try:
            missing = set(self._source.names()) - self._added - replaced - self._left_out
            assert not missing, f"never added: {sorted(missing)}"
            self._flush()
            ready = self.parts.path.with_name(f"{self.parts.path.name}-{secrets.token_hex(4)}")
            ready.mkdir()
            try:
                self._fill(ready, quantization)
                ready.rename(self._out)
            except OSError as error:
                raise CheckpointError(f"{self._out}: cannot be written ({error.strerror})") from None
            finally:
                shutil.rmtree(ready, ignore_errors=True)  # gone by now unless something failed
        except BaseException:
            self.abandon()
            raise
        self.parts.remove()
        self.parts.close()

    def _fill(self, folder: Path, quantization: Mapping[str, Any]) -> None:
        tensors = self.parts.tensors()
        shards = _shards(tensors, self._max_shard_bytes)
        files = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        files = files if len(files) > 1 else [SINGLE]
        for file, names in zip(files, shards, strict=True):
            write_shard(folder / file, {name: tensors.spec(name) for name in names}, tensors.tensor)
        if len(files) > 1:
            shard_of = {name: file for file, names in zip(files, shards, strict=True) for name in names}
            index = {
                "metadata": {"total_size": tensors.num_bytes},
                "weight_map": dict(sorted(shard_of.items())),
            }
            (folder / INDEX).write_text(_json(index), encoding="utf-8")
        config = {**self._source.config, "quantization_config": dict(quantization)}
        config.pop("compression_config", None)  # its old name
        if config.get("tie_word_embeddings") and HEAD in tensors.names():  # a head of its own
            config["tie_word_embeddings"] = False
        (folder / "config.json").write_text(_json(config), encoding="utf-8")
        for path in sorted({path for pattern in COPIED for path in self._source.path.glob(pattern)}):
            if path.is_file():
                copy = folder / path.relative_to(self._source.path)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
        for name, content in self.files.items():
            (folder / name).write_text(content, encoding="utf-8")


def _shards(tensors: TensorFolder, most: int) -> list[list[str]]:
    """Return the tensors' names in shards of at most `most` bytes; tensors of one module share a shard."""
    modules: dict[str, list[str]] = {}
    for name in tensors.stored_names():
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    shards: list[list[str]] = [[]]
    filled = 0
    for names in modules.values():
        size = sum(tensors.spec(name).num_bytes for name in names)
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1] += names
        filled += size
    return shards


def _head_is_copy(source: Checkpoint) -> bool:
    """Whether a head is stored that config.json ties to the embedding, and is the same."""
    if not source.config.get("tie_word_embeddings") or not source.has(HEAD) or not source.has(EMBEDDING):
        return False
    same = source.spec(HEAD) == source.spec(EMBEDDING)
    return same and torch.equal(source.tensor(HEAD), source.tensor(EMBEDDING))


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
