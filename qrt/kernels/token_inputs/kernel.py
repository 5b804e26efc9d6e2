"""`token_inputs` as one Triton program: the plan of the splits needs all lengths at once, and there are
few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.checks import expect
from qrt.kernels.decode_attention import MIN_SPLIT_TOKENS, SPLIT_TOKENS, at_once, max_splits

MIN_TILE = 16


@triton.jit(do_not_specialize=["tokens_in_step", "most", "programs"])
def _token_inputs(
    rows, given, tokens, length, last_token, slot_table, stride_table, ids, positions, slots, kv_lens, splits,
    tokens_in_step, most, programs,
    T: tl.constexpr, CUTS: tl.constexpr, MIN_LENGTH: tl.constexpr, STARTUP: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, T)
    real = t < tokens_in_step
    row = tl.load(rows + t, mask=real, other=0).to(tl.int64)
    at = tl.load(given + t, mask=real, other=0)
    lens = tl.where(at < 0, tl.load(length + row, mask=real, other=0), at + 1)
    lens = tl.where(real, lens, 0)
    position = tl.maximum(lens - 1, 0)
    token = tl.load(tokens + t, mask=real, other=0)
    last = tl.load(last_token + row, mask=real, other=0)
    tl.store(ids + t, tl.where(token < 0, last, token.to(tl.int64)), mask=real)
    tl.store(positions + t, position, mask=real)
    tl.store(slots + t, tl.load(slot_table + row * stride_table + position, mask=real, other=0), mask=real)
    tl.store(kv_lens + t, lens, mask=real)

    cut = tl.arange(0, CUTS) + 1
    longest = tl.full([CUTS], 0, tl.float32) + tl.max(lens, 0).to(tl.float32)
    part = tl.maximum(tl.div_rn(longest, cut.to(tl.float32)), MIN_LENGTH)
    known = tl.broadcast_to(lens.to(tl.float32)[None, :], [CUTS, T])
    parts = tl.maximum(tl.ceil(tl.div_rn(known, tl.broadcast_to(part[:, None], [CUTS, T]))), 1.0)
    every = tl.sum(tl.where(real[None, :], parts, 0.0), 1)
    waves = tl.ceil(tl.div_rn(every, tl.full([CUTS], 0, tl.float32) + programs))
    cost = tl.where(cut <= most, waves * (part + STARTUP), float("inf"))
    best = tl.argmin(cost, 0)
    chosen = tl.sum(tl.where((tl.arange(0, CUTS) == best)[:, None], parts, 0.0), 0)
    tl.store(splits + t, chosen.to(tl.int32), mask=real)


def token_inputs(
    rows: Tensor,
    given: Tensor,
    tokens: Tensor,
    length: Tensor,
    last_token: Tensor,
    slot_table: Tensor,
    num_kv_heads: int,
    programs_per_sm: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the package's docstring."""
    T = expect(rows, "T", torch.int32, "rows")["T"]
    for name, each in {"given": given, "tokens": tokens}.items():
        expect(each, "T", torch.int32, name, T=T)
    ids = torch.empty(T, dtype=torch.int64, device=rows.device)
    positions, slots, kv_lens, splits = (torch.empty_like(rows) for _ in range(4))
    most = max_splits(T, num_kv_heads, rows.device)
    tile, cuts = max(MIN_TILE, triton.next_power_of_2(T)), triton.next_power_of_2(most)
    _token_inputs[(1,)](
        rows, given, tokens, length, last_token, slot_table, slot_table.stride(0), ids, positions, slots,
        kv_lens, splits, T, most, at_once(num_kv_heads, programs_per_sm, rows.device),
        T=tile, CUTS=cuts, MIN_LENGTH=MIN_SPLIT_TOKENS, STARTUP=SPLIT_TOKENS,
        num_warps=4 if tile * cuts <= 2048 else 8,
    )  # fmt: skip
    return ids, positions, slots, kv_lens, splits
