"""What a layer reads beside hidden states: positions, rotary tables, masks; equal for all windows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qrt.arch import Arch
from qrt.arch.layer import Reach
from qrt.definitions.rope import RopeTables, rope_tables, rotate


class Around(NamedTuple):
    """What a layer reads beside hidden states [B, T, H].

    positions   int64 [T]
    rope        tables of these positions, or None: nothing is rotated
    mask        which tokens a query attends, bool [T, T], or what is added to its scores, fp32 [Hq, T, T];
                None: those up to itself
    q_scale     fp32 [T], what q is multiplied by, or None
    """

    positions: Tensor
    rope: RopeTables | None
    mask: Tensor | None
    q_scale: Tensor | None


def around(arch: Arch, seqlen: int, device: torch.device) -> list[Around]:
    """Return what each layer reads for windows of `seqlen` tokens; layers of a kind share it."""
    positions = torch.arange(seqlen, device=device)
    q_scale, spec = None, arch.q_scale
    if spec is not None:
        q_scale = 1 + spec.strength * torch.log1p((positions + spec.first) // spec.length)
    ropes = {
        key: rope_tables(rope.of_length(seqlen), arch.head_dim, seqlen, device)
        for key, rope in arch.ropes.items()
    }
    masks = {reach: _mask(arch, reach, positions) for reach in arch.reaches}
    return [
        Around(
            positions,
            None if layer.rope is None else ropes[layer.rope],
            masks[arch.reach(i)],
            q_scale if layer.q_scaled else None,
        )
        for i, layer in enumerate(arch.layers)
    ]


def _mask(arch: Arch, reach: Reach, positions: Tensor) -> Tensor | None:
    behind = positions[:, None] - positions  # how far each query is behind each token
    seen = behind >= 0
    if reach.window:
        seen &= behind < reach.window
    if reach.segment:
        seen &= positions[:, None] // reach.segment == positions // reach.segment
    if not arch.alibi:
        return seen if 0 < reach.most < len(positions) else None
    slopes = torch.tensor(arch.alibi, device=positions.device)
    return (-behind * slopes[:, None, None]).masked_fill(~seen, float("-inf"))


def rotated(x: Tensor, at: Around) -> Tensor:
    """Return x [B, T, heads, D] rotated by its positions."""
    return x if at.rope is None else rotate(x, at.rope, at.positions)
