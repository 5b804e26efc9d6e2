"""The working folder of a checkpoint being written: parts that survive whatever happens to the process.

    <out>.partial/plan.json      what is being written; a run with another plan may not continue from here
                  00007.part     tensors, a safetensors file
                  <label>.json   a finished step: the files of its parts, and notes; written after them

A step is finished once its JSON exists. Every file is written under another name, synced and renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from qrt.errors import CheckpointError, ConfigError
from qrt.folder import read_json
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.shard import Shard, open_shard, write_shard
from qrt.quant.spec import TensorSpec

PLAN = "plan.json"
LOCK = "lock"
UNFINISHED = ".unfinished"


class Parts:
    """The parts in `path`; `plan` says what they are parts of. With None no later run continues from them."""

    def __init__(self, path: Path, plan: Mapping[str, Any] | None) -> None:
        self.path = path
        self._plan = None if plan is None else json.loads(json.dumps(plan))
        self._files: list[str] = []  # files of finished steps, in order
        self._notes: dict[str, Mapping[str, Any]] = {}
        self._open: list[str] = []  # files of the step being written

    def begin(self) -> None:
        """Make the folder, or take up the finished steps of an earlier run with the same plan.

        ConfigError: another run is writing there, or the parts are of another plan; CheckpointError: the
        folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "w")
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.path}: another run is writing there; wait for it, or end it") from None
        if (self.path / PLAN).is_file():
            self._take_up(read_json(self.path / PLAN))
        for path in self.path.iterdir():  # removes files of a step that did not finish
            if path.name not in (LOCK, PLAN, *self._files, *(f"{label}.json" for label in self._notes)):
                path.unlink()
        self._write_json(PLAN, {"plan": self._plan})

    def _take_up(self, found: Mapping[str, Any]) -> None:
        if found.get("plan") != self._plan or self._plan is None:
            old, new = found.get("plan") or {}, self._plan or {}
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            raise ConfigError(
                f"{self.path}: parts of another run ({', '.join(changed) or 'its plan'} differs); "
                "remove the folder, or choose another --out"
            )
        steps = [(path.stem, read_json(path)) for path in self.path.glob("*.json") if path.name != PLAN]
        for label, step in sorted(steps, key=lambda pair: pair[1]["files"]):
            self._files += step["files"]
            self._notes[label] = step["notes"]

    @property
    def labels(self) -> list[str]:
        """The finished steps, in order."""
        return list(self._notes)

    def notes(self, label: str) -> Mapping[str, Any]:
        """Return what `finish` was given for a step."""
        return self._notes[label]

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of the step in progress."""
        name = f"{len(self._files) + len(self._open):05d}.part"
        specs = {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        write_shard(self.path / (name + UNFINISHED), specs, tensors.__getitem__)
        (self.path / (name + UNFINISHED)).rename(self.path / name)
        self._open.append(name)

    def finish(self, label: str, notes: Mapping[str, Any]) -> None:
        """End the step in progress: from here on it survives."""
        self._write_json(f"{label}.json", {"files": self._open, "notes": dict(notes)})
        self._files += self._open
        self._open = []
        self._notes[label] = dict(notes)

    def step(self, label: str) -> TensorFolder:
        """Return the tensors of a finished step."""
        files = read_json(self.path / f"{label}.json")["files"]
        return TensorFolder(self.path, _by_name(self._shards(files)))

    def tensors(self) -> TensorFolder:
        """Return the tensors of all steps."""
        return TensorFolder(self.path, _by_name(self._shards([*self._files, *self._open])))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Give up the lock."""
        self._lock.close()

    def _shards(self, files: list[str]) -> list[Shard]:
        return [open_shard(self.path / file) for file in files]

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file under another name, sync it and rename it."""
        path = self.path / (name + UNFINISHED)
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(value, file)
                file.flush()
                os.fsync(file.fileno())
            path.rename(self.path / name)
            folder = os.open(self.path, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as error:
            raise CheckpointError(f"{self.path / name}: cannot be written ({error.strerror})") from None


def _by_name(shards: list[Shard]) -> dict[str, Shard]:
    return {name: shard for shard in shards for name in shard.tensors}
