"""`token_inputs` and `advance` in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.kernels.decode_attention.plan import FIELDS, max_parts, plan_kv_splits


def empty_inputs(
    rows: Tensor, decodes: int, num_kv_heads: int, heads_per_sm: int, windows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors that `token_inputs` returns, uninitialized."""
    room = max_parts(decodes, num_kv_heads, heads_per_sm, rows.device) if decodes else 0
    return (
        rows.new_empty(rows.shape, dtype=torch.int64),
        torch.empty_like(rows),
        torch.empty_like(rows),
        rows.new_empty(decodes),
        rows.new_empty(windows, room, FIELDS),
    )


def token_inputs(
    inputs: Tensor,
    length: Tensor,
    last_token: Tensor,
    slot_table: Tensor,
    decodes: int,
    num_kv_heads: int,
    heads_per_sm: int,
    windows: Sequence[int],
    segments: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the package's docstring."""
    rows, given, tokens = inputs
    kv_lens = torch.where(given < 0, length[rows], given + 1)
    positions = (kv_lens - 1).clamp(min=0)
    ids = torch.where(tokens < 0, last_token[rows], tokens.long())
    slots = slot_table[rows.long(), positions.long()]
    kv_lens = torch.where(given < 0, kv_lens, -1)[:decodes]
    if decodes:
        own = rows[:decodes], kv_lens, num_kv_heads, heads_per_sm
        kv_splits = torch.stack(
            [plan_kv_splits(*own, *reach) for reach in zip(windows, segments, strict=True)]
        )
    else:
        kv_splits = rows.new_empty(len(windows), 0, FIELDS)
    return ids, positions, slots, kv_lens, kv_splits


def advance(rows: Tensor, tokens: Tensor, counts: Tensor | None, last_token: Tensor, length: Tensor) -> None:
    """See the package's docstring."""
    last_token.index_copy_(0, rows, tokens.clamp(min=0))
    length.index_add_(0, rows, torch.ones_like(rows, dtype=torch.int32) if counts is None else counts)
