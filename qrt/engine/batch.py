"""Batch: a plan as tensors on the device. Only slot numbers, prompt tokens and row numbers travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from qrt.engine.plan import Plan
from qrt.engine.sampler import SampleMeta
from qrt.engine.table import RequestTable
from qrt.engine.transfer import to_device
from qrt.kernels.decode_attention import PROGRAMS_PER_SM, plan_splits
from qrt.kernels.step import DecodeMeta, PrefillMeta, StepMeta


@dataclass(frozen=True)
class Draws:
    """What is sampled in a step, and how.

    meta         the S rows
    logprobs     int64 [l]: which of the S want log-probabilities; None: none
    num_top      likeliest tokens to name at each of them, the most that any of them asks for
    """

    meta: SampleMeta
    logprobs: Tensor | None
    num_top: int


@dataclass(frozen=True)
class Batch:
    """What the runner needs of one step.

    draws        of the S = len(step.logit_rows) sampled rows; None when nothing is sampled
    targets      per chunk that scores prompt tokens: int64 [n]
    """

    step: StepMeta
    draws: Draws | None
    targets: dict[str, Tensor]


def build(
    plan: Plan,
    table: RequestTable,
    *,
    num_kv_heads: int,
    attend_cache: bool,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> Batch:
    """Bring the request table up to date and describe the step. Decodes come first, then the chunks.

    `programs_per_sm` as in `plan_splits`.
    """
    if plan.admitted:
        table.admit(plan.admitted)
    arrays = {**_token_arrays(plan, table.slot_table.shape[1]), **_sample_arrays(plan)}
    cached = [chunk.end if attend_cache else chunk.start for chunk in plan.chunks]
    arrays["cached_start"] = _int32([0], np.cumsum(cached))
    arrays |= {f"targets {c.request_id}": _int64(c.scoring.targets) for c in plan.chunks if c.scoring}
    sent = to_device({name: array for name, array in arrays.items() if array.size}, table.device)
    table.slot_table.view(-1).index_copy_(0, sent["written"], sent["written_slots"])
    decode, prefill = None, None
    tokens, positions = [], []
    if plan.decodes:
        rows = sent["decode_rows"]
        kv_lens = table.length[rows]
        tokens.append(table.last_token[rows])
        positions.append(kv_lens - 1)
        decode = DecodeMeta(rows, kv_lens, plan_splits(kv_lens, num_kv_heads, programs_per_sm))
    if plan.chunks:
        rows, kv_lens = sent["chunk_rows"], sent["chunk_ends"]
        table.length[rows] = kv_lens
        tokens.append(sent["chunk_tokens"])
        positions.append(sent["chunk_positions"])
        longest = max(len(chunk.tokens) for chunk in plan.chunks)
        prefill = PrefillMeta(
            rows,
            kv_lens,
            sent["query_start"],
            sent["cached_start"],
            max_query_len=longest,
            num_cached=sum(cached),
            max_cached_len=max(cached),
            attend_cache=attend_cache,
        )
    step = StepMeta(
        _join(tokens),
        _join(positions),
        sent["slots"],
        table.slot_table,
        sent.get("logit_rows", sent["slots"].new_empty(0, dtype=torch.int64)),
        decode,
        prefill,
    )
    targets = {c.request_id: sent[f"targets {c.request_id}"] for c in plan.chunks if c.scoring}
    return Batch(step, _draws(plan, sent) if plan.sampled else None, targets)


def drawn_plainly(plan: Plan) -> bool:
    """Whether all that is sampled is greedy, or drawn by temperature and seed alone, and no more is asked."""
    return not any(
        work.banned or work.sampling.filtered or work.sampling.num_logprobs is not None
        for work in plan.sampled
    )


def draws(plan: Plan, device: torch.device) -> Draws:
    """What `build` says of a plan's draws, by itself."""
    arrays = _sample_arrays(plan)
    return _draws(plan, to_device({name: a for name, a in arrays.items() if a.size}, device))


def _token_arrays(plan: Plan, width: int) -> dict[str, NDArray[Any]]:
    """The step's tokens: what, where, and into which slots; and the entries of the slot table [R, width] that
    are new, as flat indices."""
    chunks = plan.chunks
    places = np.array([(d.row, d.position, d.slot) for d in plan.decodes], np.int64).reshape(-1, 3)
    rows, positions, slots = places.T
    lengths = [len(chunk.tokens) for chunk in chunks]
    ends = [chunk.row * width + chunk.end for chunk in chunks]
    written = [np.arange(end - len(chunk.slots), end) for end, chunk in zip(ends, chunks, strict=True)]
    own_slots = [chunk.slots[len(chunk.slots) - n :] for chunk, n in zip(chunks, lengths, strict=True)]
    return {
        "decode_rows": rows.astype(np.int32),
        "slots": _int32(slots, *own_slots),
        "chunk_rows": _int32([chunk.row for chunk in chunks]),
        "chunk_ends": _int32([chunk.end for chunk in chunks]),
        "query_start": _int32([0], np.cumsum(lengths)),
        "chunk_tokens": _int64(*[chunk.tokens for chunk in chunks]),
        "chunk_positions": _int32(*[np.arange(chunk.start, chunk.end) for chunk in chunks]),
        "written": _int64(rows * width + positions, *written),
        "written_slots": _int32(slots, *[chunk.slots for chunk in chunks]),
    }


def _sample_arrays(plan: Plan) -> dict[str, NDArray[Any]]:
    """Which hidden states are sampled, for which rows, and how."""
    ends, last = [], len(plan.decodes)
    for chunk in plan.chunks:
        last += len(chunk.tokens)
        if chunk.samples:
            ends.append(last - 1)
    rows: list[int] = []
    draws: list[int] = []
    filtered: list[int] = []
    logprobs: list[int] = []
    banned: list[tuple[int, int]] = []
    for index, work in enumerate(plan.sampled):
        sampling = work.sampling
        rows.append(work.row)
        if sampling.filtered:
            filtered.append(len(draws))
        if sampling.temperature > 0:
            draws.append(index)
        if sampling.num_logprobs is not None:
            logprobs.append(index)
        banned += [(index, token) for token in work.banned]
    return {
        "logit_rows": _int64(range(len(plan.decodes)), ends),
        "sample_rows": _int64(rows),
        "draws": _int64(draws),
        "filtered": _int64(filtered),
        "logprobs": _int64(logprobs),
        "banned": np.array(banned, np.int64).reshape(-1, 2).T,
    }


def _draws(plan: Plan, sent: dict[str, Tensor]) -> Draws:
    ks = [work.sampling.top_k for work in plan.sampled if work.sampling.filtered]
    max_top_k = max(ks) if ks and min(ks) > 0 else 0
    meta = SampleMeta(
        sent["sample_rows"], sent.get("draws"), sent.get("filtered"), max_top_k, sent.get("banned")
    )
    num_top = max(work.sampling.num_logprobs or 0 for work in plan.sampled)
    return Draws(meta, sent.get("logprobs"), num_top)


def _int32(*parts: ArrayLike) -> NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *parts], dtype=np.int32, casting="unsafe")


def _int64(*parts: ArrayLike) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64, casting="unsafe")


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
