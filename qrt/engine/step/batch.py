"""Batch: a plan as tensors on the device. Only new slots, prompt tokens and row numbers travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from qrt.engine.schedule.plan import Plan
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.sampler import SampleMeta
from qrt.engine.step.table import RequestTable
from qrt.engine.step.transfer import to_device
from qrt.kernels.decode_attention.plan import plan_parts
from qrt.kernels.prefill_attention.tiles import Queries
from qrt.kernels.step import Chunks, DecodeMeta, PrefillMeta, StepMeta


@dataclass(frozen=True)
class Draws:
    """What is sampled in a step, and how.

    tokens       int64 [S]: which of the step's tokens each of the S is drawn after
    meta         how
    logprobs     int64 [l]: which of the S want log-probabilities; None: none
    num_top      likeliest tokens to name at each of them, the most that any of them asks for
    """

    tokens: Tensor
    meta: SampleMeta
    logprobs: Tensor | None
    num_top: int


@dataclass(frozen=True)
class Batch:
    """What the runner needs of one step.

    draws        None when nothing is sampled
    targets      per chunk that scores prompt tokens: int64 [n]
    """

    step: StepMeta
    draws: Draws | None
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
) -> Batch:
    """Describe the step, whose `admitted` and `placed` the table knows. Decodes come first, then the chunks.

    `heads_per_sm` as in `plan_parts`.
    """
    chunks = chunks_of(plan, queries, attend_cache=attend_cache)
    arrays = {**_token_arrays(plan), **_sample_arrays(plan, adjustments)}
    if plan.chunks:
        arrays |= {f"chunk {name}": array for name, array in chunks.arrays().items()}
    arrays |= {f"targets {c.request_id}": _int64(c.scoring.targets) for c in plan.chunks if c.scoring}
    sent = to_device({name: array for name, array in arrays.items() if array.size}, table.device)
    decode, prefill = None, None
    tokens, positions, rows = [], [], []
    if plan.decodes:
        decoding = sent["decode_rows"]
        kv_lens = table.length[decoding]
        rows.append(decoding)
        tokens.append(table.last_token[decoding])
        positions.append(kv_lens - 1)
        parts = plan_parts(decoding, kv_lens, num_kv_heads, heads_per_sm)
        decode = DecodeMeta(decoding, kv_lens, parts, newest=True)
    if plan.chunks:
        table.length[sent["chunk rows"]] = sent["chunk_ends"]
        rows.append(sent["token_rows"])
        tokens.append(sent["chunk_tokens"])
        positions.append(sent["chunk_positions"])
        own = {name: sent[f"chunk {name}"] for name in ("rows", "query_start", "cached_start", "tiles")}
        prefill = PrefillMeta(**own, num_cached=chunks.num_cached, attend_cache=attend_cache)
    at = _join(positions)
    slots = table.slots(_join(rows), at)
    step = StepMeta(_join(tokens), at, slots, table.slot_table, decode, prefill)
    targets = {c.request_id: sent[f"targets {c.request_id}"] for c in plan.chunks if c.scoring}
    return Batch(step, _draws(plan, sent), targets)


def chunks_of(plan: Plan, queries: Queries, *, attend_cache: bool) -> Chunks:
    """Return the plan's chunks as a step describes them."""
    return Chunks(
        [chunk.row for chunk in plan.chunks],
        [len(chunk.tokens) for chunk in plan.chunks],
        [chunk.start for chunk in plan.chunks],
        queries,
        len(plan.decodes),
        attend_cache,
    )


def drawn_plainly(plan: Plan) -> bool:
    """Whether all that is sampled is greedy, or drawn by temperature and seed alone, and no more is asked."""
    return all(work.sampling.plain and not work.banned for work in plan.sampled)


def draws(plan: Plan, adjustments: Adjustments, device: torch.device) -> Draws | None:
    """`Batch.draws` of a plan, by itself."""
    arrays = _sample_arrays(plan, adjustments)
    sent = to_device({name: a for name, a in arrays.items() if a.size}, device)
    return _draws(plan, sent)


def _token_arrays(plan: Plan) -> dict[str, NDArray[Any]]:
    """The rows of its tokens, and the tokens of its chunks."""
    chunks = plan.chunks
    lengths = [len(chunk.tokens) for chunk in chunks]
    return {
        "decode_rows": _int32([decode.row for decode in plan.decodes]),
        "token_rows": np.repeat(_int32([chunk.row for chunk in chunks]), lengths),
        "chunk_ends": _int32([chunk.end for chunk in chunks]),
        "chunk_tokens": _int64(*[chunk.tokens for chunk in chunks]),
        "chunk_positions": _int32(*[np.arange(chunk.start, chunk.end) for chunk in chunks]),
    }


def _sample_arrays(plan: Plan, adjustments: Adjustments) -> dict[str, NDArray[Any]]:
    """Which hidden states are sampled, for which rows, and how."""
    careful: list[int] = []
    filtered: list[int] = []
    adjusted: list[tuple[int, int]] = []
    banned: list[tuple[int, int, int]] = []
    for index, work in enumerate(plan.sampled):
        sampling = work.sampling
        if not (sampling.filtered or sampling.adjustment or work.banned):
            continue
        if sampling.filtered:
            filtered.append(len(careful))
        if sampling.adjustment:
            adjusted.append((len(careful), work.row))
        banned += [(len(careful), *ban) for ban in work.banned]
        careful.append(index)
    places = adjustments.places([row for _, row in adjusted])
    return {
        "sampled_at": _int64(plan.sampled_at),
        "sample_rows": _int64([work.row for work in plan.sampled]),
        "careful": _int64(careful),
        "filtered": _int64(filtered),
        "adjusted": np.array([[index for index, _ in adjusted], places], np.int64),
        "banned": np.array(banned, np.int64).reshape(-1, 3).T,
        "logprobs": _int64([i for i, w in enumerate(plan.sampled) if w.sampling.num_logprobs is not None]),
    }


def _draws(plan: Plan, sent: dict[str, Tensor]) -> Draws | None:
    if not plan.sampled:
        return None
    ks = [work.sampling.top_k for work in plan.sampled if work.sampling.filtered]
    meta = SampleMeta(
        sent["sample_rows"],
        sent.get("careful"),
        sent.get("adjusted"),
        sent.get("banned"),
        sent.get("filtered"),
        max(ks) if ks and min(ks) > 0 else 0,
    )
    num_top = max(work.sampling.num_logprobs or 0 for work in plan.sampled)
    return Draws(sent["sampled_at"], meta, sent.get("logprobs"), num_top)


def _int32(*parts: ArrayLike) -> NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *parts], dtype=np.int32, casting="unsafe")


def _int64(*parts: ArrayLike) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64, casting="unsafe")


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
