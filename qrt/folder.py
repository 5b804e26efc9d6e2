"""A model's folder: where it is, and its config.json. Torch-free, so that what is wrong with it is told at
once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qrt.assets import model_path
from qrt.errors import CheckpointError

CONFIG = "config.json"
MAX_JSON_BYTES = 2**26  # an index of many thousand tensors has some 10 MB
GGUF = "is GGUF, which qrt does not read; download the safetensors it was made from"


def model_folder(name: str | Path) -> Path:
    """The folder of the model `name`: "tiny" or a path; CheckpointError where there is none."""
    folder = model_path(str(name)) or Path(name)
    if not folder.exists():
        raise CheckpointError(
            f"{name}: no such folder; give a checkpoint folder "
            "(hf download ORG/NAME --local-dir FOLDER) or 'tiny'"
        )
    if not folder.is_dir():
        raise CheckpointError(f"{name}: not a folder; give the checkpoint folder that holds {CONFIG}")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder; CheckpointError without one."""
    if not is_file(folder / CONFIG):
        raise CheckpointError(f"{folder}: no {CONFIG}; {_instead(folder)}")
    return read_json(folder / CONFIG)


def _instead(folder: Path) -> str:
    """What a folder without config.json is, and what to do."""
    if is_file(folder / "adapter_config.json"):
        return "an adapter, which is not run; merge it into its model (peft: merge_and_unload) and save that"
    if gguf := next(iter(sorted(folder.glob("*.gguf"))), None):
        return f"{gguf.name} {GGUF}"
    if snapshot := next(iter(sorted(folder.glob("snapshots/*"))), None):
        return f"a model's folder in the Hub's cache; give {snapshot}"
    return "wanted a Hugging Face checkpoint folder"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError when it cannot be read, is too large or something else."""
    try:
        expect_at_most(path, MAX_JSON_BYTES)
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error}); download or copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, got {type(value).__name__}")
    return value


def expect_at_most(path: Path, most: int) -> None:
    """CheckpointError for a larger file, before it is in memory."""
    if (size := path.stat().st_size) > most:
        raise CheckpointError(f"{path}: {size} bytes, wanted at most {most}; download or copy it again")


def is_file(path: Path) -> bool:
    """Whether there is a file; CheckpointError for a link to one that is gone and for an impossible name."""
    try:
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"{path}: a link to {path.readlink()}, which is gone; download the checkpoint again"
            )
        return path.is_file()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
