"""Find a model by the name a user gives: a folder, "tiny", or ORG/NAME[@REVISION] of the Hugging Face Hub.

An existing folder wins. A model of the Hub lies in the cache as `models--ORG--NAME/snapshots/COMMIT`, so the
folder's path tells the model and the commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from qrt.assets import model_path
from qrt.errors import CheckpointError, ConfigError
from qrt.model_files.folder import CONFIG
from qrt.model_files.hub import Repository

HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(.+))?", re.ASCII)
SNAPSHOT = re.compile(r"/models--((?:(?!--)[^/])+)--((?:(?!--)[^/])+)/snapshots/([0-9a-f]{40})$")
EXPECTED = "a checkpoint folder, ORG/NAME[@REVISION] of the Hugging Face Hub such as Qwen/Qwen3-8B, or 'tiny'"


def model_folder(
    name: str | Path,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    weights: bool = True,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """Return the folder of the model `name`; download it from the Hub if needed.

    `check` sees a folder with config.json before any weight is downloaded; its errors end the download.
    Without `weights` only the files that describe the model are downloaded. CheckpointError where the model
    does not exist or cannot be downloaded.
    """
    place = _place(name, revision, download_dir)
    if isinstance(place, Repository):
        return place.model(weights=weights, check=check)
    if check is not None:
        check(place)
    return place


def tokenizer_folder(
    name: str | Path, *, revision: str | None = None, download_dir: str | Path | None = None
) -> Path:
    """Return a folder with the tokenizer of the model `name`; found as `model_folder` finds models."""
    place = _place(name, revision, download_dir)
    return place.tokenizer() if isinstance(place, Repository) else place


def model_name(model: str | Path) -> str:
    """Return a model's name: ORG/NAME for a folder in the Hub's cache, any other name unchanged."""
    found = _snapshot(model)
    return f"{found[1]}/{found[2]}" if found else str(model)


def api_name(model: str | Path) -> str:
    """Return a model's name for clients: ORG/NAME of the Hub without revision, or a folder's own name."""
    if (found := _snapshot(model)) is not None:
        return f"{found[1]}/{found[2]}"
    named = None if Path(model).is_dir() else HUB_NAME.fullmatch(str(model))
    return named[1] if named else Path(model).resolve().name


def short_name(model: str | Path) -> str:
    """Return a model's name for files: NAME of ORG/NAME, or a folder's own name."""
    return api_name(model).rpartition("/")[2]


def pinned_name(model: str | Path) -> str:
    """Return `model_name` with @COMMIT for a model of the Hub, so that it always means the same files."""
    commit = model_commit(model)
    return f"{model_name(model)}@{commit}" if commit else str(model)


def model_commit(model: str | Path) -> str | None:
    """Return the commit of a folder in the Hub's cache; None for any other."""
    found = _snapshot(model)
    return found[3] if found else None


def _snapshot(model: str | Path) -> re.Match[str] | None:
    return SNAPSHOT.search(Path(model).resolve().as_posix())


def _place(name: str | Path, revision: str | None, download_dir: str | Path | None) -> Path | Repository:
    folder = model_path(str(name)) or Path(name)
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(
                f"revision: expected none for the folder {name}, got {revision!r}; leave it out"
            )
        return folder
    if folder.exists():
        raise CheckpointError(f"{name}: not a folder; give the checkpoint folder that holds {CONFIG}")
    found = HUB_NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(f"{name}: no such folder; give {EXPECTED}")
    if revision is not None and found[2] not in (None, revision):
        raise ConfigError(f"revision: expected one, got {revision!r} and {name}; name one of the two")
    return Repository.of(found[1], found[2] or revision, download_dir)
