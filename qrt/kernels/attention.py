"""Attention of a step over one layer's cache: calls the operators with what a layer holds.

q [T, Hq, D], k and v [T, Hkv, D] and out [T, Hq, D] hold all tokens of the step. rope is cos and sin, fp32
[P, D/2] each; a token is rotated by the row of its position, or by that in `StepMeta.rope_positions`. If
there is one row, all tokens are rotated by it. Each operator's package says what it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from qrt.kernels.attention_rule import AttentionRule
from qrt.kernels.decode_attention import append_attention, decode_attention
from qrt.kernels.head_norms import HeadNorms
from qrt.kernels.kv_write import kv_write
from qrt.kernels.prefill_attention import prefill_attention
from qrt.kernels.sizes import next_power_of_2
from qrt.kernels.step import KVLayer, StepMeta


def _rope_positions(rope: tuple[Tensor, Tensor], step: StepMeta) -> Tensor | None:
    """Return each token's row of `rope`, int32 [T]; None: its position."""
    if len(rope[0]) > 1:
        return step.rope_positions
    count = len(step.tokens)
    return _first_rows(next_power_of_2(count), step.tokens.device)[:count]


@cache  # CUDA graphs hold its address
def _first_rows(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: HeadNorms | None,
    rope: tuple[Tensor, Tensor],
    step: StepMeta,
    kv: KVLayer,
) -> None:
    """Apply norms and RoPE to q and k, turn q, k and v into the cache's basis, store k and v (`kv_write`).

    All changes q, k and v in place.
    """
    rows = _rope_positions(rope, step)
    rows = step.positions if rows is None else rows
    slots = step.places(kv.group).slots
    kv_write(q, k, v, *rope, rows, slots, kv.buffers, kv.smoothing, kv.format, *(norms or ()))


def attend_decodes(q: Tensor, step: StepMeta, kv: KVLayer, out: Tensor, scores: AttentionRule) -> None:
    """Write the attention of the tokens that decode, if any, to `out` (`decode_attention`)."""
    if decode := step.decode:
        decode_attention(
            q[: step.num_decodes],
            kv.buffers,
            step.places(kv.group).slot_table,
            decode.rows,
            decode.kv_lens,
            decode.kv_splits[scores.plan],
            out[: step.num_decodes],
            kv.format,
            scores.scale,
            decode.newest,
            scores.window,
            scores.softcap,
            scores.slopes,
            scores.sinks,
            scores.segment,
        )


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, step: StepMeta, kv: KVLayer, out: Tensor, scores: AttentionRule
) -> None:
    """Write the attention of the prefill chunks' tokens, if any, to `out` (`prefill_attention`)."""
    if chunks := step.prefill:
        prefill_attention(
            q,
            k,
            v,
            kv.buffers,
            step.places(kv.group).slot_table,
            chunks.rows,
            chunks.query_start,
            chunks.cached_start,
            chunks.tiles,
            out,
            chunks.num_cached,
            chunks.attend_cache,
            kv.format,
            scores.scale,
            scores.window,
            scores.softcap,
            scores.slopes,
            scores.sinks,
            scores.segment,
        )


def append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: HeadNorms | None,
    rope: tuple[Tensor, Tensor],
    step: StepMeta,
    kv: KVLayer,
    out: Sequence[Tensor],
    scores: AttentionRule,
) -> None:
    """Do `store` and `attend_decodes` in one launch, for a step that only decodes (`append_attention`).

    `out` is [out], or [codes, facts] of `Digits` to write the result into. q, k and v stay as they are.
    """
    decode = step.decode
    assert decode is not None, "a step without decodes"
    append_attention(
        q,
        k,
        v,
        *rope,
        kv.buffers,
        kv.smoothing,
        step.places(kv.group).slot_table,
        decode.rows,
        decode.kv_lens,
        decode.kv_splits[scores.plan],
        out,
        kv.format,
        scores.scale,
        scores.window,
        scores.softcap,
        scores.slopes,
        scores.sinks,
        _rope_positions(rope, step),
        scores.segment,
        *(norms or ()),
    )
