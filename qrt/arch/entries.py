"""Entries of a config.json, checked as they are read: CheckpointError names the one that is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qrt.errors import CheckpointError

# What a config.json may ask for, before anything is allocated for it.
MAX_SIZE, MAX_LAYERS = 2**24, 2**12


def typed(config: Mapping[str, Any], key: str, *kinds: type | None) -> Any:
    """An entry that is of one of `kinds`, None among them for null; CheckpointError where it is not."""
    value = config.get(key)
    if not any(value is None if kind is None else isinstance(value, kind) for kind in kinds):
        wanted = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise CheckpointError(f"config.json: {key} is {value!r}, expected {wanted}")
    return value


def positive(config: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    """A whole number from 1 to `most`; the default, if there is one, for null and for no entry."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}, wanted a positive integer")
    if value > most:
        raise CheckpointError(f"config.json: {key} is {str(value)[:20]}, wanted at most {most:,}")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0; the default, if there is one, for null and for no entry."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key} is {value!r}, wanted a positive number")
    return float(value)


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """An entry that holds one token id, a list of them, or none."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) for token in ids):
        raise CheckpointError(f"config.json: {key} is {value!r}, wanted a token id or a list of them")
    return tuple(ids)
