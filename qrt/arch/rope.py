"""Read the rotary embedding of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qrt.arch.entries import MAX_SIZE, number, positive
from qrt.errors import CheckpointError, UnsupportedError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of a head: frequencies theta^(-2i/turning), rescaled by `kind`.

    kind      "default", "linear", "llama3", "yarn" or "longrope"
    rotary_dim  channels of a head that RoPE rotates; the others keep their place
    pairs     which channels turn together: "halves" of the turning ones, or "neighbours"
    truncate  (yarn) the band between kept and stretched channels begins and ends at whole channels
    factors   (longrope) what each pair's frequency is divided by
    short_factors   (longrope) the same in requests that fit `original_max_position`; empty: no other ones
    length    what cos and sin of the turning channels are multiplied by
    short_length    (longrope) the same in requests that use `short_factors`
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    pairs: str = "halves"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    length: float = 1.0
    short_length: float = 1.0

    def of_length(self, tokens: int) -> RopeConfig:
        """Return how a request of so many tokens turns."""
        if not self.short_factors or tokens > self.original_max_position:
            return self
        return replace(self, factors=self.short_factors, short_factors=(), length=self.short_length)


def rope_offset(length: int, long_rope_switch: int) -> int:
    """Return the row of the RoPE tables for position 0 of a request of `length` tokens.

    Where requests use tables by their length, the tables hold the positions of short requests, those of at
    most `long_rope_switch` tokens, in front of all positions of long ones (0: all requests turn alike).
    """
    return long_rope_switch if length > long_rope_switch else 0


def rope(config: Mapping[str, Any], head_dim: int, max_position: int) -> tuple[RopeConfig, int]:
    """Return the embedding, and the context that it stretches to.

    transformers 5 writes `rope_parameters`; older checkpoints have `rope_theta` and `rope_scaling`.
    """
    entry = parameters(config)
    if any(isinstance(value, Mapping) for value in entry.values()):
        raise UnsupportedError(
            "config.json: rope_parameters: expected one object for all layers, got one per kind of layer"
        )
    return rope_of(config, entry, head_dim, max_position)


def parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry that says how RoPE is rescaled, by kind of layer where that differs."""
    entry = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(entry, dict):
        raise CheckpointError(f"config.json: rope_scaling: expected an object or null, got {entry!r}")
    return entry


def rope_of(
    config: Mapping[str, Any], entry: Mapping[str, Any], head_dim: int, max_position: int
) -> tuple[RopeConfig, int]:
    """Return the embedding that `entry` describes, and the context that it stretches to.

    What `entry` leaves out is taken from `config`.
    """
    entry = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | dict(entry)
    if config.get(original := "original_max_position_embeddings") is not None:  # it wins, as in transformers
        entry[original] = config[original]
    kind = entry.get("rope_type") or entry.get("type") or "default"
    theta = number(entry, "rope_theta")
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta: expected more than 1, got {theta}")
    part = number(entry, "partial_rotary_factor", 1.0)
    if part > 1:
        raise CheckpointError(f"config.json: partial_rotary_factor: expected at most 1, got {part}")
    rotary_dim = int(head_dim * part)
    if part != 1 and (rotary_dim % 2 or not rotary_dim):
        raise UnsupportedError(
            f"config.json: partial_rotary_factor: expected an even number of rotated channels, "
            f"got {rotary_dim}, {part} of head_dim {head_dim}"
        )
    plain = RopeConfig(theta, rotary_dim)
    match kind:
        # dynamic differs beyond max_position alone, which qrt does not serve; mrope is for images
        case "default" | "dynamic" | "mrope":
            return _slower(entry, plain) if kind == "dynamic" else plain, max_position
        case "linear":
            factor = number(entry, "factor")
            return replace(plain, kind=kind, factor=factor), _stretched(max_position, factor)
        case "llama3":
            rope = replace(
                plain,
                kind=kind,
                factor=number(entry, "factor"),
                low_freq_factor=number(entry, "low_freq_factor"),
                high_freq_factor=number(entry, "high_freq_factor"),
                original_max_position=positive(entry, "original_max_position_embeddings", max_position),
            )
            return rope, max_position
        case "yarn":
            rope = _yarn(entry, plain, max_position)
            return rope, _stretched(rope.original_max_position, rope.factor)
        case "longrope" | "su":
            return _longrope(entry, plain, max_position), max_position
    raise UnsupportedError(
        f"config.json: RoPE type: expected 'default', 'linear', 'llama3', 'yarn', 'longrope' or 'dynamic', "
        f"got {kind!r}"
    )


def _slower(entry: Mapping[str, Any], plain: RopeConfig) -> RopeConfig:
    """Return dynamic RoPE as HunYuan has it: with an `alpha` its theta is larger at every length."""
    if (alpha := number(entry, "alpha", 1.0)) > MAX_SIZE:
        raise CheckpointError(f"config.json: RoPE's alpha: expected at most {MAX_SIZE:,}, got {alpha}")
    return replace(plain, theta=plain.theta * alpha ** (plain.rotary_dim / max(plain.rotary_dim - 2, 1)))


def _yarn(entry: Mapping[str, Any], plain: RopeConfig, max_position: int) -> RopeConfig:
    """Read YaRN (Peng et al., arXiv:2309.00071) as transformers does."""
    original = positive(entry, "original_max_position_embeddings", max_position)
    factor = number(entry, "factor", max_position / original)
    stretch = 0.1 * math.log(max(factor, 1.0))
    length = 1 + stretch
    if entry.get("mscale") and entry.get("mscale_all_dim"):
        length = 1 + stretch * number(entry, "mscale")
        length /= 1 + stretch * number(entry, "mscale_all_dim")
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        low_freq_factor=number(entry, "beta_slow", 1.0),
        high_freq_factor=number(entry, "beta_fast", 32.0),
        original_max_position=original,
        truncate=bool(entry.get("truncate", True)),
        length=number(entry, "attention_factor", length),
    )


def _longrope(entry: Mapping[str, Any], plain: RopeConfig, max_position: int) -> RopeConfig:
    """Read LongRoPE (Ding et al., arXiv:2402.13753), whose long factors are for longer requests."""
    original = positive(entry, "original_max_position_embeddings", max_position)
    factor = number(entry, "factor", max_position / original)
    short = _factors(entry, "short_factor", plain)
    longer = _factors(entry, "long_factor", plain) if max_position > original else ()
    length = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    length = number(entry, "attention_factor", length)
    short_length = number(entry, "short_mscale", length)  # PhiMoE's
    return replace(
        plain,
        kind="longrope",
        factors=longer or short,
        short_factors=short if longer else (),
        original_max_position=original,
        length=number(entry, "long_mscale", length) if longer else short_length,
        short_length=short_length,
    )


def _factors(entry: Mapping[str, Any], name: str, plain: RopeConfig) -> tuple[float, ...]:
    """Read the divisor of each pair's frequency."""
    factors = entry.get(name)
    if not isinstance(factors, list) or len(factors) != plain.rotary_dim // 2:
        raise CheckpointError(
            f"config.json: expected {name} as a list of {plain.rotary_dim // 2} numbers, one for each pair "
            f"of rotated channels, got {factors!r:.60}"
        )
    return tuple(number({name: value}, name) for value in factors)


def _stretched(max_position: int, factor: float) -> int:
    context = int(max_position * factor)
    if context > MAX_SIZE:
        raise CheckpointError(
            f"config.json: expected a context of at most {MAX_SIZE:,} as RoPE stretches it, got {context:,}"
        )
    return context
