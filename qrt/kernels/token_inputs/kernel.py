"""`token_inputs` and `advance` in Triton.

Of `token_inputs`, most programs fill in the tokens. One more plans the parts, as that needs all lengths at
once, and there are few.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.checks import expect
from qrt.kernels.decode_attention.plan import FIELDS, MIN_PART, STARTUP, UNIT, at_once, max_cuts
from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import variant
from qrt.kernels.op import takes
from qrt.kernels.sizes import cdiv, next_power_of_2
from qrt.kernels.token_inputs import ref
from qrt.kernels.token_inputs.ref import empty_inputs

MIN_TILE = 16
_TOKENS = 256  # per program of `token_inputs`
_ROWS = 256  # per program of `advance`


@triton.jit
def _known(rows, given, length, t, real):
    """Return each token's row, given position, and how many tokens its request has up to it."""
    row = tl.load(rows + t, mask=real, other=0).to(tl.int64)
    at = tl.load(given + t, mask=real, other=0)
    lens = tl.where(at < 0, tl.load(length + row, mask=real, other=0), at + 1)
    return row, at, lens


@triton.jit(do_not_specialize=["tokens_in_step", "decodes", "most", "programs", "room"])
def _token_inputs(
    rows, given, tokens, length, last_token, slot_table, stride_table, ids, positions, slots, kv_lens,
    kv_splits,
    tokens_in_step, decodes, most, programs, room,
    TOKENS: tl.constexpr, T: tl.constexpr, CUTS: tl.constexpr, ROOM: tl.constexpr, AT_ONCE: tl.constexpr,
    UNIT: tl.constexpr, MIN_PART: tl.constexpr, STARTUP: tl.constexpr, FIELDS: tl.constexpr,
    WINDOWS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TOKENS tokens and, if any decode, one program more for each window and segment).

    Those plan the parts of `decodes` <= T requests. WINDOWS and SEGMENTS are tuples of as many numbers, 0 for
    all tokens.
    """
    if tl.program_id(0) * TOKENS < tokens_in_step:
        t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        real = t < tokens_in_step
        row, at, lens = _known(rows, given, length, t, real)
        position = tl.maximum(lens - 1, 0)
        token = tl.load(tokens + t, mask=real, other=0)
        last = tl.load(last_token + row, mask=real, other=0)
        slot = tl.load(slot_table + row * stride_table + position, mask=real, other=0)
        tl.store(ids + t, tl.where(token < 0, last, token.to(tl.int64)), mask=real)
        tl.store(positions + t, position, mask=real)
        tl.store(slots + t, slot, mask=real)
        tl.store(kv_lens + t, tl.where(at < 0, lens, -1), mask=t < decodes)
        return
    t = tl.arange(0, T)
    real = t < decodes
    row, at, lens = _known(rows, given, length, t, real)
    real &= at < 0
    lens = tl.where(real, lens, 0)
    before, which = 0 * lens, tl.program_id(0) - tl.cdiv(tokens_in_step, TOKENS)
    for i in tl.static_range(len(WINDOWS)):
        passed = lens * 0
        if WINDOWS[i] > 0:
            passed = tl.maximum(lens - WINDOWS[i], 0)
        if SEGMENTS[i] > 0:
            passed = tl.maximum(lens - 1, 0) // SEGMENTS[i] * SEGMENTS[i]
        before = tl.where(which == i, passed, before)
    lens -= before
    kv_splits += which * room * FIELDS
    cuts = tl.arange(0, CUTS) + 1
    part = tl.maximum(tl.cdiv(tl.cdiv(tl.max(lens, 0), cuts), UNIT) * UNIT, MIN_PART)
    counts = tl.maximum(tl.cdiv(lens[None, :], part[:, None]), 1)
    every = tl.sum(tl.where(real[None, :], counts, 0), 1)
    cost = tl.cdiv(every, programs) * (part + STARTUP)
    cost = tl.where((cuts <= most) & ((every <= room) | (cuts == 1)), cost, 0x7FFFFFFF)
    best = tl.argmin(cost, 0)  # the fewest cuts if costs are equal
    length = tl.sum(tl.where(tl.arange(0, CUTS) == best, part, 0), 0)
    _store_kv_splits(
        kv_splits, t, row.to(tl.int32), before, lens, real, length, room, T, ROOM, AT_ONCE, FIELDS
    )


@triton.jit
def _store_kv_splits(
    kv_splits, request, row, before, lens, real, length, room,
    T: tl.constexpr, ROOM: tl.constexpr, AT_ONCE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Do `plan.cut` of the tokens behind the first `before`, AT_ONCE parts of every request at a time."""
    counts = tl.where(real, tl.maximum(tl.cdiv(lens, length), 1), 0)
    ends = tl.cumsum(counts, 0)
    for first in range(0, tl.max(counts, 0), AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)[None, :]
        at = kv_splits + ((ends - counts)[:, None] + index) * FIELDS
        there = index < counts[:, None]
        start = index * length
        tl.store(at, tl.broadcast_to(request[:, None], [T, AT_ONCE]), mask=there)
        tl.store(at + 1, tl.broadcast_to(row[:, None], [T, AT_ONCE]), mask=there)
        end = before[:, None] + tl.minimum(start + length, lens[:, None])
        tl.store(at + 2, before[:, None] + tl.broadcast_to(start, [T, AT_ONCE]), mask=there)
        tl.store(at + 3, end, mask=there)
        tl.store(at + 4, tl.broadcast_to(index, [T, AT_ONCE]), mask=there)
        tl.store(at + 5, tl.broadcast_to(counts[:, None], [T, AT_ONCE]), mask=there)
    entry = tl.arange(0, ROOM)
    none = (entry >= tl.sum(counts, 0)) & (entry < room)
    tl.store(kv_splits + entry * FIELDS, tl.full([ROOM], -1, tl.int32), mask=none)


@takes(ref.token_inputs)
def token_inputs(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the package's docstring."""
    T = expect(a.inputs, "3 T", torch.int32, "inputs")["T"]
    rows, given, tokens = a.inputs
    if a.decodes > T:
        raise ValueError(f"decodes: expected at most {T}, the step's tokens; got {a.decodes}")
    filled = empty_inputs(rows, a.decodes, a.num_kv_heads, a.heads_per_sm, len(a.windows))
    most, tile, room = max_cuts(a.decodes), max(MIN_TILE, next_power_of_2(a.decodes)), filled[4].shape[1]
    cuts, tokens_each = next_power_of_2(most), min(_TOKENS, max(MIN_TILE, next_power_of_2(T)))
    kernel = variant(
        _token_inputs, TOKENS=tokens_each, T=tile, CUTS=cuts, ROOM=next_power_of_2(room),
        AT_ONCE=max(1, min(16, 1024 // tile)), UNIT=UNIT, MIN_PART=MIN_PART, STARTUP=STARTUP, FIELDS=FIELDS,
        WINDOWS=tuple(a.windows), SEGMENTS=tuple(a.segments),
        num_warps=4 if tile * cuts <= 2048 else 8 if tile <= 512 else 16,
    )  # fmt: skip
    kernel.launch(
        (cdiv(T, tokens_each) + len(a.windows) * (a.decodes > 0),), rows, given, tokens, a.length,
        a.last_token, a.slot_table, a.slot_table.stride(0), *filled, T, a.decodes, most,
        at_once(a.num_kv_heads, a.heads_per_sm, rows.device), room,
    )  # fmt: skip
    return filled


@triton.jit(do_not_specialize=["S"])
def _advance(rows, tokens, counts, last_token, length, S, ROWS: tl.constexpr, launch_pdl: tl.constexpr):
    """Grid (cdiv(S, ROWS),)."""
    after_previous(launch_pdl)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = at < S
    row = tl.load(rows + at, mask=real, other=0)
    more = 1 if counts is None else tl.load(counts + at, mask=real, other=0)
    token = tl.maximum(tl.load(tokens + at, mask=real, other=0), 0)
    tl.store(last_token + row, token, mask=real)
    tl.store(length + row, tl.load(length + row, mask=real, other=0) + more, mask=real)


def advance(rows: Tensor, tokens: Tensor, counts: Tensor | None, last_token: Tensor, length: Tensor) -> None:
    """See the package's docstring."""
    if S := len(rows):
        kernel = variant(_advance, ROWS=_ROWS, launch_pdl=overlaps(rows.device))
        kernel.launch((cdiv(S, _ROWS),), rows, tokens, counts, last_token, length, S)
