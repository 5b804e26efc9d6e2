"""Rotary position embedding: the cos and sin of every position, made once and shared by all layers.

Channel i of the first half of a head turns with channel i of the second half by the angle
position * frequency[i] (Su et al. 2021, arXiv:2104.09864; the half-split pairing of Llama checkpoints).
The rotation itself happens in `qrt.kernels.kv_write`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qrt.arch.rope import RopeConfig


class RopeTables(NamedTuple):
    """cos, sin: fp32 [P, D/2], row p for position p."""

    cos: Tensor
    sin: Tensor


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each channel pair, fp64 [D/2] on CPU: theta^(-2i/D), rescaled by `rope.kind`.

    linear: divided by the factor. llama3 (Llama 3.1): divided by the factor where fewer than
    `low_freq_factor` turns fit the original context, kept where more than `high_freq_factor` do, and
    interpolated by the number of turns in between. yarn (arXiv:2309.00071): the same, interpolated by the
    number of the channel.
    """
    base = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    match rope.kind:
        case "linear":
            return base / rope.factor
        case "llama3":
            turns = rope.original_max_position * base / (2 * math.pi)
            keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            return torch.lerp(base / rope.factor, base, keep.clamp(0, 1))
        case "yarn":
            first, last = (_channel(rope, head_dim, t) for t in (rope.high_freq_factor, rope.low_freq_factor))
            if rope.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            stretched = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 1e-3)
            return torch.lerp(base, base / rope.factor, stretched.clamp(0, 1).double())
    return base


def _channel(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """Return the pair of channels, as a real number, that turns `turns` times in the original context."""
    turned = rope.original_max_position / (2 * math.pi * turns)
    return head_dim * math.log(turned) / (2 * math.log(rope.theta))


def rope_tables(rope: RopeConfig, head_dim: int, max_position: int, device: torch.device) -> RopeTables:
    """Return the tables of positions 0..max_position-1.

    Angles are computed in fp64, so that position 100000 is as exact as 1.
    """
    positions = torch.arange(max_position, dtype=torch.float64)
    angles = torch.outer(positions, frequencies(rope, head_dim))
    cos, sin = ((rope.length * turned).float().to(device) for turned in (angles.cos(), angles.sin()))
    return RopeTables(cos, sin)
