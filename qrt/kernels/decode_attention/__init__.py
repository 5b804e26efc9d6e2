"""decode_attention: one query token per request against the cached tokens of that request.

q [B, Hq, D] (heads contiguous, any token stride), in the basis of the cache; kv: the layer's buffers in the
order of `KVFormat.buffers`; slot_table int32 [R, L]: row r, column p holds the slot of position p;
rows, kv_lens, num_splits int32 [B]: row of the table, tokens to attend, parts to cut them into. Query head
h reads KV head h // (Hq/Hkv). Returns softmax(scale * q K^T) V, [B, Hq, D] in q's dtype and the model's
basis; zeros where kv_lens is 0.

The grid depends on shapes only and lengths are read on the device, so a CUDA graph captured once serves
every context length (FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.kernels.decode_attention import ref
from qrt.kernels.gpu import multiprocessors
from qrt.kernels.op import define

MIN_SPLIT_TOKENS = 128  # a shorter part costs more to merge than it gains
SPLIT_TOKENS = 64  # what starting and merging a part costs, in tokens it could have attended
PROGRAMS_PER_SM = 12  # most that run at once, of any format
SPLITS = (8, 128)  # bounds of max_splits: one long request among many short ones, one request alone


def max_splits(batch: int, num_kv_heads: int, device: torch.device) -> int:
    """Parts of a request's KV that the grid has room for: of shapes and device only."""
    programs = 4 * PROGRAMS_PER_SM * multiprocessors(device)
    return min(max(programs // max(batch * num_kv_heads, 1), SPLITS[0]), SPLITS[1])


def at_once(num_kv_heads: int, programs_per_sm: int, device: torch.device) -> int:
    """Parts of one KV head each that the GPU attends at a time."""
    return max(1, programs_per_sm * multiprocessors(device) // num_kv_heads)


def plan_splits(kv_lens: Tensor, num_kv_heads: int, programs_per_sm: int = PROGRAMS_PER_SM) -> Tensor:
    """Parts for each of kv_lens int32 [B]: int32 [B], all of about one length.

    Of the lengths that cut the longest request evenly, the one that is done first: programs run in waves of
    as many as the GPU holds (`DecodeBlock.programs_per_sm`), and a last wave of few costs as much as a full
    one. On the device, without a sync; once per step, for all layers.
    """
    most = max_splits(kv_lens.shape[0], num_kv_heads, kv_lens.device)
    programs = at_once(num_kv_heads, programs_per_sm, kv_lens.device)
    cuts = torch.arange(1, most + 1, device=kv_lens.device)
    lengths = (kv_lens.max() / cuts).clamp(min=MIN_SPLIT_TOKENS)
    parts = torch.ceil(kv_lens / lengths[:, None]).clamp(min=1)  # [most, B]
    waves = torch.ceil(parts.sum(1) / programs)
    best = torch.argmin(waves * (lengths + SPLIT_TOKENS), 0, keepdim=True)
    return parts.index_select(0, best)[0].to(torch.int32)


def _fake(
    q: Tensor,
    kv: Sequence[Tensor],
    slot_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    num_splits: Tensor,
    format: str,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape)


decode_attention = define(
    "decode_attention(Tensor q, Tensor[] kv, Tensor slot_table, Tensor rows, Tensor kv_lens, "
    "Tensor num_splits, str format, float scale) -> Tensor",
    ref=ref.decode_attention,
    triton="qrt.kernels.decode_attention.kernel:decode_attention",
    fake=_fake,
)
