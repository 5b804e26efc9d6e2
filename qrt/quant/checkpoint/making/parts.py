"""The working folder of a checkpoint being written: parts that survive whatever happens to the process.

    <out>.partial/plan.json      what is being written; a run with another plan may not continue from here
                  00007.part     tensors, a safetensors file
                  <label>.json   a finished step: the files of its parts, and notes; written after them
                  result/        the finished checkpoint, before it is moved into place
                  placed.json    the names in it, once it is whole, and whether they are moved one by one

A step is finished once its JSON exists. Every file is written under another name, synced and renamed. A
folder with any other file is not a run's, and is left alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from qrt.errors import CheckpointError, ConfigError, QrtError
from qrt.model_files.folder import read_json
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.shard import ShardFile, open_shard, write_shard
from qrt.quant.spec import TensorSpec

PLAN = "plan.json"
LOCK = "lock"
UNFINISHED = ".unfinished"
RESULT = "result"
PLACED = "placed.json"
# files of a run beside these: parts, files being written, hidden states and gradients where RAM is short
OWN = re.compile(r"\d{5,}\.part|.*\.unfinished|(hidden-(exact|rounded)|gradients)-\d+")
STEP = {"files", "notes"}


class TensorParts:
    """The parts in `path`; `plan` says what they are parts of. With None no later run continues from them."""

    def __init__(self, path: Path, plan: Mapping[str, Any] | None) -> None:
        self.path = path
        self._plan = None if plan is None else json.loads(json.dumps(plan))
        self._files: list[str] = []  # files of finished steps, in order
        self._notes: dict[str, Mapping[str, Any]] = {}
        self._open: list[str] = []  # files of the step being written

    def check(self) -> None:
        """Raise ConfigError where the folder has a file that no run wrote."""
        if self.path.is_dir() and (foreign := next(self._foreign(), None)) is not None:
            raise ConfigError(
                f"{self.path}: expected the files of an unfinished run alone, got {foreign}, which no run "
                "wrote; move it away, or choose another --out"
            )

    @property
    def is_empty(self) -> bool:
        """Whether there is a folder without files."""
        return self.path.is_dir() and not any(self.path.iterdir())

    def begin(self) -> None:
        """Make the folder, or take up the finished steps of an earlier run with the same plan.

        ConfigError: another run is writing there, the parts are of another plan, or the folder is not a
        run's; CheckpointError: the folder cannot be written.
        """
        self.check()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "a")
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written ({error.strerror})") from None
        if not self._locked():
            raise ConfigError(f"{self.path}: another run is writing there; wait for it, or end it")
        if (self.path / PLAN).is_file():
            self._take_up(read_json(self.path / PLAN))
        kept = (LOCK, PLAN, RESULT, PLACED, *self._files, *(f"{label}.json" for label in self._notes))
        self._delete(lambda name: name not in kept)  # what a step left that did not finish
        self._write_json(PLAN, {"plan": self._plan})

    def _locked(self) -> bool:
        """Take the lock; return whether no other run has it, or has just removed the folder."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._lock.fileno()), (self.path / LOCK).stat())
        except OSError:
            return False

    def _take_up(self, found: Mapping[str, Any]) -> None:
        """Take up the finished steps; leave out those of a run without a plan, which are soon made again."""
        if found["plan"] is None:
            return
        steps = [(path.stem, read_json(path)) for path in self.path.glob("*.json") if _is_step(path)]
        if steps and found["plan"] != self._plan:
            old, new = found["plan"], self._plan or {}
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            raise ConfigError(
                f"{self.path}: parts of another run ({', '.join(changed) or 'its plan'} differs); "
                "remove the folder, or choose another --out"
            )
        for label, step in sorted(steps, key=lambda pair: pair[1]["files"]):
            self._files += step["files"]
            self._notes[label] = step["notes"]

    def _foreign(self) -> Iterator[str]:
        """Yield the names of what no run wrote."""
        begun = _content(self.path / PLAN).keys() == {"plan"}
        for path in sorted(self.path.iterdir()):
            name = path.name
            if name == LOCK and not path.stat().st_size or name == PLAN + UNFINISHED:
                continue
            if name == PLACED and _content(path).keys() == {"names", "moving"}:
                continue
            known = name == PLAN or OWN.fullmatch(name) or _is_step(path)
            if not begun or not (path.is_file() and known or path.is_dir() and name == RESULT):
                yield name

    @property
    def result(self) -> Path:
        """Where the finished checkpoint is made."""
        return self.path / RESULT

    @property
    def placed(self) -> list[str]:
        """The names in the finished checkpoint; none until it is whole."""
        return list(_content(self.path / PLACED).get("names", ()))

    @property
    def moving(self) -> list[str]:
        """Those of `placed` that may be where they belong before all of them are."""
        return self.placed if _content(self.path / PLACED).get("moving") else []

    def finish_result(self, *, moving: bool) -> None:
        """Note that the finished checkpoint is whole; with `moving`, that its files are moved one by one."""
        names = sorted(path.name for path in self.result.iterdir())
        self._write_json(PLACED, {"names": names, "moving": moving})

    def forget_result(self) -> None:
        """Remove what is there of the finished checkpoint."""
        self._delete(lambda name: name in (RESULT, PLACED))

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
        """Remove the folder; what is left of it when the process ends meanwhile is still an unfinished run's.

        A file that others have put there since stays, and the folder with it.
        """
        labels = tuple(f"{label}.json" for label in self._notes)
        self._delete(lambda name: name in labels)
        self._delete(lambda name: name not in (PLAN, LOCK, PLACED))
        for name in (PLAN, LOCK, PLACED):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    def remove_left(self) -> None:
        """Remove the folder of a run that has ended, of whatever plan."""
        if self.is_empty:
            self.path.rmdir()
            return
        with suppress(OSError, QrtError):
            self.check()
            self._lock = open(self.path / LOCK, "a")
            if self._locked():
                self._notes = {path.stem: {} for path in self.path.glob("*.json") if _is_step(path)}
                self.remove()
            self.close()

    def _delete(self, chosen: Callable[[str], bool]) -> None:
        """Remove those of the run's files whose names are `chosen`."""
        foreign = set(self._foreign())
        for path in self.path.iterdir():
            if chosen(path.name) and path.name not in foreign:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        """Give up the lock."""
        self._lock.close()

    def _shards(self, files: list[str]) -> list[ShardFile]:
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


def _content(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; {} where there is none."""
    try:
        return read_json(path) if path.is_file() else {}
    except CheckpointError:
        return {}


def _is_step(path: Path) -> bool:
    """Return whether a file says that a step is finished."""
    return path.suffix == ".json" and _content(path).keys() == STEP


def _by_name(shards: list[ShardFile]) -> dict[str, ShardFile]:
    return {name: shard for shard in shards for name in shard.tensors}
