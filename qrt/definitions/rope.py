"""Rotary position embedding: the cos and sin of every position, made once and shared by all layers.

Channel i of the first half of a head turns with channel i of the second half by the angle
position * frequency[i] (Su et al. 2021, arXiv:2104.09864; the half-split pairing of Llama checkpoints).
Other pairings become this one when weights are read (`channel_order`); pairs that do not turn have angle 0.
The rotation itself happens in `qrt.kernels.kv_write`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qrt.arch.rope import RopeConfig

BLOCK = 1 << 16  # positions whose angles are computed at a time


class RopeTables(NamedTuple):
    """cos, sin: fp32 [P, D/2], row p for position p; one row if nothing is rotated.

    Where requests use tables by their length (`Arch.long_rope_switch`), rows for short ones stand in front.
    """

    cos: Tensor
    sin: Tensor


def frequencies(rope: RopeConfig) -> Tensor:
    """Return radians per position of each rotated pair, fp64 [rotary_dim/2], rescaled by `kind`.

    linear: divided by the factor. llama3 (Llama 3.1): divided by the factor where fewer than
    `low_freq_factor` turns fit the original context, kept where more than `high_freq_factor` do, and
    interpolated by the number of turns in between. yarn (arXiv:2309.00071): the same, interpolated by the
    number of the channel. longrope (arXiv:2402.13753): divided by a factor for each pair.
    """
    pairs, rotary_dim = rope.rotary_dim // 2, rope.rotary_dim
    base = rope.theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    match rope.kind:
        case "linear":
            return base / rope.factor
        case "llama3":
            turns = rope.original_max_position * base / (2 * math.pi)
            keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            return torch.lerp(base / rope.factor, base, keep.clamp(0, 1))
        case "yarn":
            first, last = (_channel(rope, t) for t in (rope.high_freq_factor, rope.low_freq_factor))
            if rope.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, rotary_dim - 1)
            stretched = (torch.arange(pairs, dtype=torch.float32) - first) / max(last - first, 1e-3)
            return torch.lerp(base, base / rope.factor, stretched.clamp(0, 1).double())
        case "longrope":
            return base / torch.tensor(rope.factors, dtype=torch.float64)
    return base


def _channel(rope: RopeConfig, turns: float) -> float:
    """Return the pair of channels, as a real number, that makes `turns` turns in the original context."""
    turned = rope.original_max_position / (2 * math.pi * turns)
    return rope.rotary_dim * math.log(turned) / (2 * math.log(rope.theta))


def channel_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Return the channel of a checkpoint's head that goes to each place, int64 [D]; None: none moves.

    Kernels rotate channel i with channel i + D/2. Checkpoints pair halves of the rotated channels, or
    neighbours. q k^T is the same in any order that q and k share, so rows of their weights are moved at load.
    """
    pairs = rope.rotary_dim // 2
    if rope.pairs == "halves" and rope.rotary_dim == head_dim:
        return None
    first = torch.arange(pairs) if rope.pairs == "halves" else torch.arange(0, rope.rotary_dim, 2)
    second = first + (pairs if rope.pairs == "halves" else 1)
    rest = torch.arange(rope.rotary_dim, head_dim)
    still = head_dim // 2 - pairs
    return torch.cat((first, rest[:still], second, rest[still:]))


def rope_tables(
    rope: RopeConfig | None, head_dim: int, max_position: int, device: torch.device
) -> RopeTables:
    """Return the tables of positions 0..max_position-1, for channels in `channel_order`; None: no rotation.

    Angles are computed in fp64, so that position 100000 is as exact as 1, and not of all positions at once.
    """
    half, pairs = head_dim // 2, 0 if rope is None else rope.rotary_dim // 2
    count = 1 if rope is None else max_position
    cos = torch.ones(count, half, dtype=torch.float32, device=device)
    sin = torch.zeros_like(cos)
    if rope is not None:
        turns = frequencies(rope)
        for first in range(0, max_position, BLOCK):
            rows = slice(first, min(first + BLOCK, max_position))
            angles = torch.outer(torch.arange(rows.start, rows.stop, dtype=torch.float64), turns)
            cos[rows, :pairs] = (rope.length * angles.cos()).float().to(device)
            sin[rows, :pairs] = (rope.length * angles.sin()).float().to(device)
    return RopeTables(cos, sin)


def tables_by_length(
    rope: RopeConfig | None, head_dim: int, max_position: int, long_rope_switch: int, device: torch.device
) -> RopeTables:
    """Return `rope_tables` of all positions, behind those up to `long_rope_switch` (0: none)."""
    tables = rope_tables(rope, head_dim, max_position, device)
    if rope is None or not long_rope_switch:
        return tables
    short = rope_tables(rope.of_length(long_rope_switch), head_dim, long_rope_switch, device)
    return RopeTables(*(torch.cat(parts) for parts in zip(short, tables, strict=True)))


def rotate(x: Tensor, rope: RopeTables, rows: Tensor) -> Tensor:
    """Return x [T, H, D] rotated by `rows` [T] of the tables, in its dtype; computed in fp32."""
    cos, sin = (table[rows.long(), None] for table in rope)
    lo, hi = x.float().chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1).to(x.dtype)
