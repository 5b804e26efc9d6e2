"""Keep what an interrupted run has computed: one JSON line per window, in a file beside the result.

Each line carries the key of its run. The key covers everything that the figures depend on, so a run resumes
only its own lines. Writing the result removes the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qrt_eval.quality.protocol import Window

SUFFIX = ".partial"


class PartialResult:
    """Read and write the file `RESULT.partial`. Without a result file nothing is kept."""

    def __init__(self, result: str | Path | None) -> None:
        self._path = None if result is None else Path(f"{result}{SUFFIX}")

    def load(self, run: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return what was added for `run`, by index. A line that was cut off is ignored."""
        found: dict[int, dict[str, Any]] = {}
        if self._path is None or not self._path.is_file():
            return found
        key = _key(run)
        for line in self._path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if entry["run"] == key:
                found[entry["index"]] = entry["value"]
        return found

    def add(self, run: Mapping[str, Any], values: Mapping[int, Mapping[str, Any]]) -> None:
        """Append the `values` of some indices."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        key = _key(run)
        cut_off = self._path.is_file() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as file:
            file.write("\n" if cut_off else "")
            for index, value in values.items():
                file.write(json.dumps({"run": key, "index": index, "value": dict(value)}) + "\n")

    def remove(self) -> None:
        """Remove the file, once the result is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


UNKEPT = PartialResult(None)


def cut_of(windows: Sequence[Window]) -> str:
    """Return a hash of every window's tokens and of where it is scored, for the key of a run."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(repr((window.ids, window.first)).encode())
    return digest.hexdigest()


def _key(run: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]
