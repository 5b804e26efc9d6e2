"""Batch: a plan as tensors of exact sizes. Only new slots, prompt tokens and row numbers are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qrt.arch.layer import Reach
from qrt.engine.schedule.plan import Plan
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.sample_batch import SampleBatch, sample_arrays
from qrt.engine.step.table import RequestTable
from qrt.engine.step.transfer import to_device
from qrt.kernels.decode_attention.plan import plan_kv_splits
from qrt.kernels.prefill_attention.tiles import Queries
from qrt.kernels.step import Chunks, DecodeMeta, PrefillMeta, StepMeta

FROM_TABLE = -1  # as a position or token: read it from the request table


@dataclass(frozen=True)
class Batch:
    """The tensors of one step.

    samples      None when nothing is sampled
    targets      request id -> prompt tokens to score, int64 [n]
    """

    step: StepMeta
    samples: SampleBatch | None
    targets: dict[str, Tensor]


def build(
    plan: Plan,
    table: RequestTable,
    adjustments: Adjustments,
    *,
    queries: Queries,
    num_kv_heads: int,
    attend_cache: bool,
    heads_per_sm: int,
    reaches: Sequence[Reach],
) -> Batch:
    """Make the tensors of a step: first its decodes, then its chunks.

    The table must know the plan's `admitted` and `placed`. `heads_per_sm` is that of `plan_kv_splits`,
    `reaches` are the model's.
    """
    chunks = chunks_of(plan, queries, attend_cache=attend_cache)
    arrays = {**_token_arrays(plan), **sample_arrays(plan, adjustments)}
    if plan.chunks:
        arrays |= {f"chunk {name}": array for name, array in chunks.arrays().items()}
    arrays |= {
        f"targets {c.request_id}": c.scoring.targets.astype(np.int64) for c in plan.chunks if c.scoring
    }
    sent = to_device({name: array for name, array in arrays.items() if array.size}, table.device)
    decode, prefill = None, None
    tokens, positions, rows = [], [], []
    if plan.decodes:
        decoding = sent["decode_rows"]
        kv_lens = table.length[decoding]
        rows.append(decoding)
        tokens.append(table.last_token[decoding])
        positions.append(kv_lens - 1)
        kv_splits = [
            plan_kv_splits(decoding, kv_lens, num_kv_heads, heads_per_sm, *reach) for reach in reaches
        ]
        decode = DecodeMeta(decoding, kv_lens, kv_splits, newest=True)
    if plan.chunks:
        table.length[sent["chunk rows"]] = sent["chunk_ends"]
        rows.append(sent["token_rows"])
        tokens.append(sent["chunk_tokens"])
        positions.append(sent["chunk_positions"])
        own = {name: sent[f"chunk {name}"] for name in ("rows", "query_start", "cached_start", "tiles")}
        prefill = PrefillMeta(**own, num_cached=chunks.num_cached, attend_cache=attend_cache)
    at, held = _join(positions), _join(rows)
    slots, rope_positions, windowed = (
        table.slots(held, at),
        table.rope_positions(held, at),
        table.windows(held, at),
    )
    step = StepMeta(
        _join(tokens),
        at,
        slots,
        table.slot_table,
        decode,
        prefill,
        rope_positions=rope_positions,
        windows=windowed,
    )
    targets = {c.request_id: sent[f"targets {c.request_id}"] for c in plan.chunks if c.scoring}
    return Batch(step, SampleBatch.of(plan, sent), targets)


def tokens_of(plan: Plan) -> NDArray[np.int32]:
    """Return row, position and id of each token of a step, int32 [3, T]; decodes have FROM_TABLE."""
    at = len(plan.decodes)
    sizes = [len(chunk.tokens) for chunk in plan.chunks]
    described = np.full((3, at + sum(sizes)), FROM_TABLE, np.int32)
    rows, positions, tokens = described
    rows[:at] = [decode.row for decode in plan.decodes]
    for chunk, size in zip(plan.chunks, sizes, strict=True):
        own = slice(at, at := at + size)
        rows[own], positions[own], tokens[own] = chunk.row, np.arange(chunk.start, chunk.end), chunk.tokens
    return described


def chunks_of(plan: Plan, queries: Queries, *, attend_cache: bool) -> Chunks:
    """Return the plan's chunks as the step's metadata."""
    return Chunks(
        [chunk.row for chunk in plan.chunks],
        [len(chunk.tokens) for chunk in plan.chunks],
        [chunk.start for chunk in plan.chunks],
        queries,
        len(plan.decodes),
        attend_cache,
    )


def _token_arrays(plan: Plan) -> dict[str, NDArray[Any]]:
    """Return the rows of a plan's tokens, and the tokens of its chunks."""
    (rows, positions, tokens), decodes = tokens_of(plan), len(plan.decodes)
    return {
        "decode_rows": rows[:decodes],
        "token_rows": rows[decodes:],
        "chunk_ends": np.array([chunk.end for chunk in plan.chunks], np.int32),
        "chunk_tokens": tokens[decodes:].astype(np.int64),
        "chunk_positions": positions[decodes:],
    }


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
