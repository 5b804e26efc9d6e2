"""Data that ships inside the package: the bundled model `tiny` (its card: `tiny/README.md`)."""

from pathlib import Path

__all__ = ["model_path"]

_FOLDERS = {"tiny": Path(__file__).parent / "tiny"}


def model_path(name: str) -> Path | None:
    """The folder of the bundled model called `name`, or None where no bundled model has that name."""
    return _FOLDERS.get(name)
