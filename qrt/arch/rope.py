"""Read the rotary embedding of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qrt.arch.entries import MAX_SIZE, number, positive
from qrt.errors import CheckpointError, UnsupportedError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: frequencies theta^(-2i/D), rescaled by `kind`: "default", "linear", "llama3", "yarn".

    `truncate` (yarn): the band between kept and stretched channels begins and ends at whole channels.
    `length` is what cos and sin are multiplied by.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    truncate: bool = True
    length: float = 1.0


def rope(config: Mapping[str, Any], max_position: int) -> tuple[RopeConfig, int]:
    """Return the embedding, and the context that it stretches to.

    transformers 5 writes `rope_parameters`; older checkpoints have `rope_theta` and `rope_scaling`.
    """
    own = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json: rope_scaling: expected an object or null, got {own!r}")
    if any(isinstance(value, Mapping) for value in own.values()):
        raise UnsupportedError(
            "config.json: rope_parameters: expected one object for all layers, got one per kind of layer"
        )
    entry = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | own
    if config.get(original := "original_max_position_embeddings") is not None:  # it wins, as in transformers
        entry[original] = config[original]
    kind = entry.get("rope_type") or entry.get("type") or "default"
    if (part := number(entry, "partial_rotary_factor", 1.0)) != 1:
        raise UnsupportedError(f"config.json: partial_rotary_factor: expected 1, got {part}")
    theta = number(entry, "rope_theta")
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta: expected more than 1, got {theta}")
    match kind:
        case "default":
            return RopeConfig(theta), max_position
        case "linear":
            factor = number(entry, "factor")
            return RopeConfig(theta, kind, factor), _stretched(max_position, factor)
        case "llama3":
            rope = RopeConfig(
                theta,
                kind,
                factor=number(entry, "factor"),
                low_freq_factor=number(entry, "low_freq_factor"),
                high_freq_factor=number(entry, "high_freq_factor"),
                original_max_position=positive(entry, "original_max_position_embeddings", max_position),
            )
            return rope, max_position
        case "yarn":
            rope = _yarn(entry, theta, max_position)
            return rope, _stretched(rope.original_max_position, rope.factor)
    raise UnsupportedError(
        f"config.json: RoPE type: expected 'default', 'linear', 'llama3' or 'yarn', got {kind!r}"
    )


def _yarn(entry: Mapping[str, Any], theta: float, max_position: int) -> RopeConfig:
    """Read YaRN (Peng et al., arXiv:2309.00071) as transformers does."""
    original = positive(entry, "original_max_position_embeddings", max_position)
    factor = number(entry, "factor", max_position / original)
    stretch = 0.1 * math.log(max(factor, 1.0))
    length = 1 + stretch
    if entry.get("mscale") and entry.get("mscale_all_dim"):
        length = 1 + stretch * number(entry, "mscale")
        length /= 1 + stretch * number(entry, "mscale_all_dim")
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        low_freq_factor=number(entry, "beta_slow", 1.0),
        high_freq_factor=number(entry, "beta_fast", 32.0),
        original_max_position=original,
        truncate=bool(entry.get("truncate", True)),
        length=number(entry, "attention_factor", length),
    )


def _stretched(max_position: int, factor: float) -> int:
    context = int(max_position * factor)
    if context > MAX_SIZE:
        raise CheckpointError(
            f"config.json: expected a context of at most {MAX_SIZE:,} as RoPE stretches it, got {context:,}"
        )
    return context
