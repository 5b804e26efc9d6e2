"""Read and check entries of a config.json; CheckpointError names the one that is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qrt.errors import CheckpointError

# The most that a config.json may ask for; checked before anything is allocated.
MAX_SIZE, MAX_LAYERS = 2**24, 2**12


def typed(config: Mapping[str, Any], key: str, *kinds: type | None) -> Any:
    """Return an entry that must be of one of `kinds`; None among them allows null."""
    value = config.get(key)
    if not any(value is None if kind is None else isinstance(value, kind) for kind in kinds):
        expected = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise CheckpointError(f"config.json: {key}: expected {expected}, got {value!r}")
    return value


def positive(config: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    """Return a whole number from 1 to `most`; the default, if there is one, for null or a missing entry."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key}: expected a positive integer, got {value!r}")
    if value > most:
        raise CheckpointError(f"config.json: {key}: expected at most {most:,}, got {str(value)[:20]}")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number above 0; the default, if there is one, for null or a missing entry."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key}: expected a positive number, got {value!r}")
    return float(value)


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return the token ids of an entry that holds one, a list of them, or none."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) for token in ids):
        raise CheckpointError(f"config.json: {key}: expected a token id or a list of them, got {value!r}")
    return tuple(ids)
