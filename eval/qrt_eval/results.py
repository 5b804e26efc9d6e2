"""Result files: one JSON object per run with everything needed to repeat it."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qrt import __version__

PACKAGES = ("torch", "triton", "transformers")


def environment() -> dict[str, Any]:
    """Device, library versions and commit of this run."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else f"{_cpu()}, {torch.get_num_threads()} threads",
        "cuda": torch.version.cuda if gpu else None,
        "python": platform.python_version(),
        "versions": {"qrt": __version__} | {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _cpu() -> str:
    """The processor's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with "+" when files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write `result` with its environment to `path`, folders made as needed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**result, "environment": environment()}, indent=2) + "\n")
