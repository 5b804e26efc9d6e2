"""The place of a finished checkpoint: a new folder, an empty one, or an empty volume mounted there."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from qrt.errors import ConfigError
from qrt.model_files.folder import CONFIG
from qrt.quant.checkpoint.making.parts import TensorParts

INSIDE = ".partial"  # the working folder inside a volume
VOLUME = ("lost+found",)  # what an empty volume of its own may hold
MOUNTED = (errno.EBUSY, errno.EXDEV, errno.ENOTEMPTY)  # no folder can be moved there


def working_folder(out: Path) -> Path:
    """Return where the parts of `out` lie: beside it, or inside it: a volume, or under a closed parent."""
    inside = out.is_dir() and (os.path.ismount(out) or not os.access(out.parent, os.W_OK))
    return out / INSIDE if inside else out.with_name(f"{out.name}.partial")


def check_vacant(out: Path, parts: TensorParts) -> None:
    """Raise ConfigError where `out` is taken, by others or by a finished checkpoint.

    What a killed run has moved there counts for nothing as long as it has not moved all of it; the parts of
    one that has are removed.
    """
    if out.is_dir():
        passing = {*VOLUME, *(parts.moving if _left(parts) else ())}
        if parts.path.parent == out:
            passing.add(parts.path.name)
        if {path.name for path in out.iterdir()} <= passing:
            return
        if is_placed(out, parts) or parts.is_empty:
            parts.remove_left()
    if out.exists():
        raise ConfigError(f"{out}: already there and not an empty folder; remove it or choose another one")


def is_placed(out: Path, parts: TensorParts) -> bool:
    """Return whether all of the finished checkpoint has been moved to `out`."""
    return bool(parts.placed) and not _left(parts) and all((out / name).exists() for name in parts.placed)


def withdraw(out: Path, parts: TensorParts) -> None:
    """Remove the finished checkpoint, and what of it has been moved into `out`, if not all of it has."""
    for name in parts.moving if _left(parts) else ():
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    parts.forget_result()


def move(out: Path, parts: TensorParts) -> None:
    """Move the finished checkpoint to `out`: at once, or into a mounted volume file by file.

    There config.json comes last, so that no one reads a part of it.
    """
    if parts.path.parent != out:
        parts.finish_result(moving=False)
        try:
            parts.result.rename(out)
            return
        except OSError as error:
            if error.errno not in MOUNTED or not out.is_dir():
                raise
    check_vacant(out, parts)
    parts.finish_result(moving=True)
    for name in sorted(parts.placed, key=lambda name: (name == CONFIG, name)):
        shutil.move(parts.result / name, out / name)


def _left(parts: TensorParts) -> bool:
    """Return whether a part of the finished checkpoint has not been moved."""
    return parts.result.is_dir() and any(parts.result.iterdir())
