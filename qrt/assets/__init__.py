"""Data that ships inside the package: the bundled model `tiny` (its card: `tiny/README.md`)."""

from pathlib import Path

__all__ = ["model_path"]

_FOLDERS = {"tiny": Path(__file__).parent / "tiny"}


def model_path(name: str) -> Path | None:
    """Return the folder of the bundled model called `name`; None where there is no such model."""
    return _FOLDERS.get(name)
