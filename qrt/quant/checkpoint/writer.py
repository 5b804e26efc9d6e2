"""Write a quantized checkpoint: compressed-tensors, shard by shard, the same bytes every time."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qrt.errors import CheckpointError, ConfigError, UnsupportedError
from qrt.quant.checkpoint.compressed_tensors import match_rank, quantization_config, stored_as
from qrt.quant.checkpoint.folder import INDEX, SINGLE
from qrt.quant.checkpoint.reader import Checkpoint
from qrt.quant.spec import QuantSpec
from qrt.quant.weight.base import WeightData

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "*.tiktoken", "chat_template*", "generation_config.json",
)  # fmt: skip


class CheckpointWriter:
    """A context manager; `out` appears, whole, when its block ends without an exception.

    with CheckpointWriter(out, source, scheme="w4a16", spec=spec, ignore=["lm_head"], metadata={}) as writer:
        writer.add_linear("model.layers.0.mlp.up_proj", weight)
        writer.add_tensor("model.norm.weight", tensor)

    Every tensor of `source` must be added: as it is (or changed by a fold), or as the Linear it belongs to.
    Tensors are kept until their shard is full, so do not change one after adding it; memory stays below one
    shard of `max_shard_bytes` (a Linear's tensors share a shard). Until the end everything is in
    `<out>.partial-...` beside `out`, which an exception removes.

    scheme, spec   of every Linear added; `spec` is the grid that its weights must have
    ignore         targets that stay unquantized: module names, "re:<regex>"
    metadata       qrt's own facts, JSON values, under quantization_config["qrt"]

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
        max_shard_bytes: int = 5_000_000_000,
    ) -> None:
        if source.config.get("quantization_config") is not None:
            raise UnsupportedError(f"{source.path}: already quantized; start from the unquantized model")
        self._layout = stored_as(scheme).layout
        if stored_as(scheme).bits != spec.bits or not self._layout.holds(spec):
            raise UnsupportedError(f"weight scheme {scheme!r} does not store {spec}")
        out = out.resolve()
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(
                f"{out}: already there and not an empty folder; remove it or choose another one"
            )
        self._out, self._source, self._spec, self._ignore = out, source, spec, tuple(ignore)
        self._config = {
            **source.config,
            "quantization_config": quantization_config(scheme, spec, ignore, metadata),
        }
        self._partial = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
        self._max_shard_bytes = max_shard_bytes
        self._shard: dict[str, Tensor] = {}  # being filled
        self._shard_bytes: list[int] = []  # of all shards, the one being filled last
        self._shard_of: dict[str, int] = {}  # number of the shard of each tensor
        self._linears: set[str] = set()
        dtype = source.config.get("dtype") or source.config.get("torch_dtype")
        self._dtype = getattr(torch, str(dtype), None)  # loaders cast every scale to the model's dtype
        self._left_out = {HEAD} if _head_is_copy(source) else set()

    def __enter__(self) -> CheckpointWriter:
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{self._out}: cannot be written ({error.strerror})") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)  # gone by now unless something failed

    def add_linear(self, module: str, weight: WeightData) -> None:
        """Add a quantized Linear, e.g. "model.layers.0.mlp.up_proj", on the writer's grid, with its bias."""
        assert weight.scale is not None and weight.perm is None, f"{module}: not quantized, or permuted"
        grid = (weight.bits, weight.zero is None, weight.scale.shape[1])
        groups = weight.in_features // self._spec.group_of(weight.in_features)
        wanted = (self._spec.bits, self._spec.symmetric, groups)
        assert grid == wanted, f"{module}: (bits, symmetric, groups) {grid}, wanted {wanted}"
        assert self._dtype in (None, weight.scale.dtype), (
            f"{module}: scale {weight.scale.dtype}, model {self._dtype}"
        )
        assert not match_rank(module, self._ignore), f"{module} is on the ignore list"
        tensors = self._layout.encode(weight)
        if weight.bias is not None:
            tensors["bias"] = weight.bias
        self._add({f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})
        self._linears.add(module)

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add an unquantized tensor; an lm_head that merely repeats its tied embedding is left out."""
        if name not in self._left_out:
            self._add({name: tensor})

    def _add(self, tensors: dict[str, Tensor]) -> None:
        """Put `tensors` into one shard, the one being filled or, where that has no room, the next."""
        twice = tensors.keys() & self._shard_of.keys()
        assert not twice, f"added twice: {sorted(twice)}"
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._shard and self._shard_bytes[-1] + size > self._max_shard_bytes:
            self._flush()
        if not self._shard:
            self._shard_bytes.append(0)
        self._shard_bytes[-1] += size
        for name, tensor in tensors.items():
            self._shard[name] = tensor.detach().cpu().contiguous()
            self._shard_of[name] = len(self._shard_bytes) - 1

    def _flush(self) -> None:
        """Write the shard being filled, through to the disk. One metadata key: with more, bytes vary."""
        path = self._partial / str(len(self._shard_bytes) - 1)
        try:
            save_file(self._shard, path, metadata={"format": "pt"})
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be written ({error})") from None
        self._shard = {}

    def _finish(self) -> None:
        """Write what is left, name the shards, add the other files, and move the folder into place."""
        given = self._shard_of.keys() | {f"{module}.weight" for module in self._linears}
        missing = set(self._source.names()) - given - self._left_out
        assert not missing, f"never added: {sorted(missing)}"
        self._flush()
        files = self._file_names()
        for number, file in enumerate(files):
            (self._partial / str(number)).rename(self._partial / file)
        if len(files) > 1:
            weight_map = {name: files[self._shard_of[name]] for name in sorted(self._shard_of)}
            index = {"metadata": {"total_size": sum(self._shard_bytes)}, "weight_map": weight_map}
            _write_json(self._partial / INDEX, index)
        _write_json(self._partial / "config.json", self._config)
        for path in sorted({path for pattern in COPIED for path in self._source.path.glob(pattern)}):
            shutil.copyfile(path, self._partial / path.name)
        try:
            self._partial.rename(self._out)
        except OSError as error:
            raise CheckpointError(f"{self._out}: cannot be written ({error.strerror})") from None

    def _file_names(self) -> list[str]:
        count = len(self._shard_bytes)
        if count == 1:
            return [SINGLE]
        return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _head_is_copy(source: Checkpoint) -> bool:
    """Whether a head is stored that config.json ties to the embedding, and is the same."""
    if not source.config.get("tie_word_embeddings") or not source.has(HEAD) or not source.has(EMBEDDING):
        return False
    same = source.spec(HEAD) == source.spec(EMBEDDING)
    return same and torch.equal(source.tensor(HEAD), source.tensor(EMBEDDING))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
