"""A checkpoint folder in the making: tensors go into parts, parts into shards, other files are copied."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qrt.errors import CheckpointError
from qrt.model_files.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    beside_weights,
    read_json,
    without_quantization,
)
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.making.older import older_tokenizer, with_older_entries
from qrt.quant.checkpoint.making.parts import TensorParts
from qrt.quant.checkpoint.making.place import check_vacant, is_placed, move, withdraw, working_folder
from qrt.quant.checkpoint.reader import Checkpoint
from qrt.quant.checkpoint.shard import write_shard

logger = logging.getLogger(__name__)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PART_BYTES = 256 << 20  # tensors kept in memory before they go to disk


class OutputFolder:
    """The folder `out`, which appears whole when `publish` has written everything.

    parts    the tensors on disk so far
    files    further text files to write, by name
    """

    def __init__(
        self, out: Path, source: Checkpoint, plan: Mapping[str, Any] | None, max_shard_bytes: int
    ) -> None:
        out = out.resolve()
        self.parts = TensorParts(working_folder(out), plan)
        self.parts.check()
        check_vacant(out, self.parts)
        self.files: dict[str, str] = {}
        self._out, self._source, self._max_shard_bytes = out, source, max_shard_bytes
        self._part: dict[str, Tensor] = {}  # the part being filled
        self._added: set[str] = set()
        self._left_out = {HEAD} if _head_is_copy(source) else set()

    def begin(self) -> None:
        """Make the working folder, or take up an earlier one."""
        self.parts.begin()
        withdraw(self._out, self.parts)
        self._added = set(self.names())

    def names(self) -> list[str]:
        """Return the names of the tensors on disk."""
        return self.parts.tensors().names()

    def add(self, tensors: Mapping[str, Tensor], again: bool = False) -> None:
        """Add tensors (not a head that repeats the embedding); `again` replaces those of earlier steps."""
        twice = tensors.keys() & self._added
        assert again or not twice, f"added twice: {sorted(twice)}"
        self._part |= {name: t.detach().cpu() for name, t in tensors.items() if name not in self._left_out}
        self._added |= tensors.keys()
        if sum(tensor.nbytes for tensor in self._part.values()) > PART_BYTES:
            self._flush()

    def finish_step(self, label: str, notes: Mapping[str, Any]) -> None:
        """Write everything added so far to disk; it survives an interruption."""
        self._flush()
        self.parts.finish(label, notes)

    def _flush(self) -> None:
        if self._part:
            self.parts.save(self._part)
        self._part = {}

    def abandon(self) -> None:
        """Give up after an exception; finished steps stay on disk."""
        if self.parts.labels:
            logger.warning(
                "finished steps are kept in %s: the same command goes on from there", self.parts.path
            )
        else:
            self.parts.remove()
        self.parts.close()

    def publish(self, quantization: Mapping[str, Any], replaced: set[str]) -> None:
        """Copy the parts into shards, add the other files, and move the folder into place.

        `replaced` names the tensors of the source that others replace.
        """
        try:
            missing = set(self._source.names()) - self._added - replaced - self._left_out
            assert not missing, f"never added: {sorted(missing)}"
            self._flush()
            try:
                self.parts.result.mkdir()
                self._fill(self.parts.result, quantization)
                move(self._out, self.parts)
            except OSError as error:
                raise CheckpointError(f"{self._out}: cannot be written ({error.strerror})") from None
        except BaseException:
            if not is_placed(self._out, self.parts):
                withdraw(self._out, self.parts)
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
        config = with_older_entries(without_quantization(self._source.config))
        config["quantization_config"] = dict(quantization)
        if config.get("tie_word_embeddings") and HEAD in tensors.names():  # a head of its own
            config["tie_word_embeddings"] = False
        (folder / CONFIG).write_text(_json(config), encoding="utf-8")
        self._copy(folder)
        for name, content in self.files.items():
            (folder / name).write_text(content, encoding="utf-8")

    def _copy(self, folder: Path) -> None:
        """Copy the files beside the weights."""
        for path in beside_weights(self._source.path):
            copy = folder / path.relative_to(self._source.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        settings = folder / TOKENIZER_CONFIG
        if settings.exists() and (folder / TOKENIZER).exists():
            with suppress(CheckpointError):  # not JSON: copied as it is
                given = read_json(settings)
                if (changed := older_tokenizer(given)) != given:
                    settings.write_text(_json(changed), encoding="utf-8")


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
    """Whether the source stores a head that equals the embedding, to which config.json ties it."""
    if not source.config.get("tie_word_embeddings") or not source.has(HEAD) or not source.has(EMBEDDING):
        return False
    same = source.spec(HEAD) == source.spec(EMBEDDING)
    return same and torch.equal(source.tensor(HEAD), source.tensor(EMBEDDING))


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
