"""Tell which architecture a config.json names, and read it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrt.arch import ARCHS, Arch
from qrt.arch.entries import Entries
from qrt.errors import CheckpointError


def architecture(config: Mapping[str, Any], path: str | Path) -> str:
    """Return the architecture's name from `config`, the config.json of the folder `path`.

    Without `architectures` it is the causal model of `model_type`, as in transformers. CheckpointError where
    neither names it.
    """
    given = config.get("architectures")
    names = given or []
    if not names and isinstance(kind := config.get("model_type"), str):
        names = [name for name in ARCHS if _model_type(name) == kind.replace("_", "")][:1]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"{path}: config.json: architectures: expected a list of one name, e.g. {next(iter(ARCHS))!r}, "
            f"got {given!r}; download config.json again"
        )
    return names[0]


def _model_type(name: str) -> str:
    return name.removesuffix("ForCausalLM").replace("_", "").lower()


def read_arch(config: Mapping[str, Any], path: str | Path) -> Arch:
    """Return the architecture of `config`, the config.json of the folder `path`, with its sizes.

    Raises CheckpointError for an impossible entry, UnsupportedError for an architecture that qrt does not
    know and for an entry that changes the result and that the architecture does not have; each names it.
    """
    entries = Entries(config, architecture(config, path))
    arch = ARCHS[entries.architecture](entries)
    entries.refuse_unread()
    return arch
