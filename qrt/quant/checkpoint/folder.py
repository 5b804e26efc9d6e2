"""The tensors of a checkpoint folder, by name, over one or many safetensors files; views of some of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from qrt.checks import expect
from qrt.errors import CheckpointError
from qrt.model_files.folder import is_file, no_weights, read_json, weight_files
from qrt.quant.checkpoint.shard import ShardFile, open_shard
from qrt.quant.spec import TensorSpec
from qrt.registry import nearest

WEIGHT = ".weight"
BESIDE = ("_bias", "_input_scale", "_activation_scale")  # endings that say nothing about the weight
MISMATCH = "the weights do not match config.json; download both again"


class TensorFolder:
    """Tensors by name. Opening reads the headers of all shards and no data.

    path      the folder
    shards    the shard of each tensor, if already known
    """

    def __init__(self, path: Path, shards: Mapping[str, ShardFile] | None = None) -> None:
        self.path = path
        self._shard_of = _shards(path) if shards is None else dict(shards)

    def names(self) -> list[str]:
        """Return all tensor names, sorted."""
        return sorted(self._shard_of)

    def stored_names(self) -> list[str]:
        """Return all tensor names in the order of the shards and of their headers."""
        return list(self._shard_of)

    def has(self, name: str) -> bool:
        """Whether there is a tensor `name`."""
        return name in self._shard_of

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of a tensor without reading its data; CheckpointError when it is absent."""
        return self.shard(name).tensors[name][0]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as stored."""
        return sum(self.spec(name).num_bytes for name in self._shard_of)

    def tensor(
        self,
        name: str,
        shape: str | None = None,
        dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
        **sizes: int,
    ) -> Tensor:
        """Map one tensor as stored, on the CPU: its data are read from disk when they are used.

        Checks it as `sizes` does. In the shape of a Linear's tensor N counts outputs and K inputs, so that a
        view may return those of some only (`qrt.quant.checkpoint.cut`).
        """
        self.sizes(name, shape, dtype, **sizes)
        return self.shard(name).tensor(name)

    def sizes(
        self,
        name: str,
        shape: str | None,
        dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
        **sizes: int,
    ) -> Mapping[str, int]:
        """Check shape and dtype of a tensor; return the sizes of the letters, without reading its data.

        Raises CheckpointError, naming tensor and folder, when it is absent or has another shape or dtype than
        asked for (`shape`, `dtype` and `sizes` are those of `qrt.checks.expect`).
        """
        try:
            return expect(self.spec(name), shape, dtype, self.name_in_messages(name), **sizes)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}; {MISMATCH}") from None

    def outputs(self, count: int) -> Tensor:
        """Return which of a Linear's `count` outputs `tensor` returns, int64 in their order: all."""
        return torch.arange(count)

    def inputs(self, count: int) -> Tensor:
        """Return which of a Linear's `count` inputs `tensor` returns, int64 in their order: all."""
        return torch.arange(count)

    def shard(self, name: str) -> ShardFile:
        """Return the shard that holds a tensor; CheckpointError when it is absent."""
        if name not in self._shard_of:
            stored, names = self.name_in_messages(name), map(self.name_in_messages, self._shard_of)
            raise CheckpointError(f"{self.path}: no tensor {stored!r}{nearest(stored, list(names))}")
        return self._shard_of[name]

    def name_in_messages(self, name: str) -> str:
        """Return how errors call a tensor."""
        return name


def mismatch(path: Path, name: str, came: Iterable[int], expected: Iterable[int]) -> CheckpointError:
    """Return the error of a tensor or a module whose shape config.json says otherwise."""
    return CheckpointError(
        f"{path}: {name}: expected shape {list(expected)}, as config.json says, got {list(came)}; "
        "correct config.json or download the checkpoint again"
    )


class ExpertTensors(TensorFolder):
    """The tensors of one expert of those that are stored together [E, ...], under the names of a Linear.

    So every format reads it as it reads a Linear. `stack` is the name of the tensor of unquantized weights;
    tools add endings to it:

    stack                               the Linear's
    experts.gate_up_proj                experts.gate_up_proj.weight
    experts.gate_up_proj_scale_inv      experts.gate_up_proj.weight_scale_inv
    experts.gate_up_proj_bias           experts.gate_up_proj.bias
    moe.input_linear.weight             the same name, and that of all others of the module

    Nothing of the other experts is mapped. `module` is the Linear that it is.
    """

    def __init__(self, folder: TensorFolder, stack: str, names: Iterable[str], index: int) -> None:
        """`names` are the tensors of `folder` among which are those of the stack."""
        self.path, self._stack = folder.path, stack
        self.module = stack.removesuffix(WEIGHT)
        self._stored = {own: name for name in names if (own := self._own_name(name)) is not None}
        self._shard_of = {own: _slice_of(folder, name, own, index) for own, name in self._stored.items()}
        if not self._shard_of:
            folder.spec(stack)  # raises, as there is no such tensor

    def without(self, name: str) -> ExpertTensors:
        """Return the same tensors but for `name`."""
        other = copy.copy(self)
        other._shard_of = {own: shard for own, shard in self._shard_of.items() if own != name}
        return other

    def name_in_messages(self, name: str) -> str:
        """Return the name of a tensor as it is stored, or would be."""
        if name in self._stored:
            return self._stored[name]
        if self._stack.endswith(WEIGHT) or not name.startswith(f"{self.module}."):
            return name
        kind = name.removeprefix(self.module)
        return f"{self._stack}{kind.removeprefix(WEIGHT).replace('.', '_', 1)}"

    def _own_name(self, stored: str) -> str | None:
        """Return the Linear's name of a stored tensor; None for one of another module."""
        if stored.startswith(f"{self.module}."):
            return stored
        kind = stored.removeprefix(self._stack)
        if stored.startswith(self._stack) and kind in BESIDE:
            return f"{self.module}.{kind[1:]}"
        is_own = stored.startswith(self._stack) and kind[:1] in ("", "_")
        return f"{self.module}{WEIGHT}{kind}" if is_own else None


def _slice_of(folder: TensorFolder, stored: str, own: str, index: int) -> ShardFile:
    """Return a shard that holds element `index` of the tensor `stored`, as `own`."""
    shard = folder.shard(stored)
    spec, begin = shard.tensors[stored]
    if not spec.shape or index >= spec.shape[0]:
        raise CheckpointError(
            f"{folder.path}: {stored}: expected more than {index} experts, got "
            f"{spec.shape[0] if spec.shape else 'one number'}; {MISMATCH}"
        )
    one = TensorSpec(spec.shape[1:], spec.dtype)
    return ShardFile(shard.path, {own: (one, begin + index * one.num_bytes)})


def _shards(folder: Path) -> dict[str, ShardFile]:
    """Return the opened shard of each tensor; a single file wins over an index, as in transformers."""
    names = [path.name for path in folder.iterdir() if not path.is_dir()]
    single, listed = weight_files(names)
    if single is not None and is_file(folder / single):
        shard = open_shard(folder / single)
        return dict.fromkeys(shard.tensors, shard)
    if listed is None or not is_file(folder / listed):
        raise no_weights(folder, names)
    index = folder / listed
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(
            f'{index}: expected a "weight_map" from tensor names to file names, got {weight_map!r:.50}'
        )
    shards = {file: _open_listed(index, file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            raise CheckpointError(f"{index}: tensor {name!r} is not in {file}; download both again")
    return {name: shards[file] for name, file in weight_map.items()}


def _open_listed(index: Path, file: str) -> ShardFile:
    """Open a shard that an index names; refuse a name that leaves the folder (links inside it are fine)."""
    if file != Path(file).name or file == "..":
        raise CheckpointError(f"{index}: expected plain file names inside the folder, got {file!r}")
    if not is_file(index.parent / file):
        raise CheckpointError(f"{index}: names {file!r}, which is not there; download the missing shard")
    return open_shard(index.parent / file)
