"""Which architectures qrt itself runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrt.arch import ARCHS, MIXTURES, Arch
from qrt.errors import CheckpointError, UnsupportedError


def runnable(config: Mapping[str, Any], path: Path) -> Arch:
    """The architecture that `config`, the config.json of the folder `path`, names; CheckpointError where it
    names none, UnsupportedError for one that qrt does not run."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"{path}: config.json names no architecture ('architectures' is {names!r})")
    if names[0] in MIXTURES:
        raise UnsupportedError(
            f"{names[0]} is a mixture of experts, which qrt does not run; vLLM and SGLang do"
        )
    return ARCHS[names[0]]
