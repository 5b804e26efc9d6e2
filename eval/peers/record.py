"""Read the arguments of a peer's script and record what it ran; needs nothing but torch and safetensors."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

FILE = "peer.json"
WINDOWS = "windows.safetensors"


def arguments(description: str | None, recipes: Mapping[str, Any]) -> argparse.Namespace:
    """Parse the flags that all peers' scripts have: the model, the windows, the recipe and the new folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="folder of the original")
    parser.add_argument("--windows", required=True, help="folder that windows.py made")
    parser.add_argument("--recipe", required=True, choices=list(recipes))
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    found = parser.parse_args()
    if found.out.exists():
        parser.error(f"--out {found.out}: expected a new folder, this one exists; remove it or name another")
    return found


def read_windows(folder: str) -> Tensor:
    """Return the calibration windows, int64 [count, tokens]."""
    windows: Tensor = load_file(Path(folder) / WINDOWS)["ids"]
    return windows


class Record:
    """Times a run from its creation and writes what it was into the folder that it made."""

    def __init__(self, package: str, label: str) -> None:
        """`package` is the distribution whose version counts, `label` what the table calls the run."""
        self._facts = {"by": f"{package} {version(package)}, {label}"}
        self._start = time.monotonic()

    def write(self, out: Path, windows: int, grid: str, **facts: Any) -> None:
        """Write peer.json; `facts` may hold `bits_per_weight` where score.py cannot count them itself."""
        seconds = round(time.monotonic() - self._start)
        command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
        versions = {"torch": torch.__version__}
        text = self._facts | {"grid": grid, "windows": windows, "seconds": seconds, "command": command}
        (out / FILE).write_text(json.dumps(text | facts | {"versions": versions}, indent=2) + "\n")
