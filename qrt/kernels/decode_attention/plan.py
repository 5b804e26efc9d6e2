"""How the tokens of decoding requests are cut into parts that the GPU attends side by side.

A kernel's grid is settled when a CUDA graph is captured, the lengths are not: so the parts are a list on the
device, as long as the grid may need, and a program reads from its entry what it attends. Entries without a
part are few: starting a program that finds nothing to do takes an SM a quarter of a microsecond.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.gpu import multiprocessors

FIELDS = 8  # int32 of a part: a sector of memory
UNIT = 64  # tokens of which parts are made, the last of a request aside
MIN_PART = 128  # tokens; a shorter part costs more to merge than it gains
STARTUP = 64  # what starting and merging a part costs, in tokens it could have attended
CUTS = (8, 128)  # most parts of a request: among many of them, and among few
_CUTS_TIMES_REQUESTS = 1 << 13  # that one program can weigh


def at_once(num_kv_heads: int, heads_per_sm: int, device: torch.device) -> int:
    """Parts that the GPU attends at a time, all KV heads of them."""
    return max(1, heads_per_sm * multiprocessors(device) // num_kv_heads)


def max_parts(requests: int, num_kv_heads: int, heads_per_sm: int, device: torch.device) -> int:
    """Length of the list: one part for each request, and as many again as run at once."""
    return requests + at_once(num_kv_heads, heads_per_sm, device)


def max_cuts(requests: int) -> int:
    """Parts that one request may be cut into."""
    return min(max(_CUTS_TIMES_REQUESTS // (1 << (max(requests, 1) - 1).bit_length()), CUTS[0]), CUTS[1])


def plan_parts(rows: Tensor, kv_lens: Tensor, num_kv_heads: int, heads_per_sm: int) -> Tensor:
    """The parts of requests with kv_lens int32 [B] tokens at rows int32 [B]: int32 [max_parts, FIELDS].

    Of the lengths that cut the longest request evenly, the one that is done first: programs run in waves of
    as many as the GPU holds (`DecodeBlock.heads_per_sm`), and a last wave of few costs as much as a full
    one. On the device, without a sync; once per step, for all layers.
    """
    programs = at_once(num_kv_heads, heads_per_sm, kv_lens.device)
    room = max_parts(len(kv_lens), num_kv_heads, heads_per_sm, kv_lens.device)
    if not len(kv_lens):
        return cut(rows, kv_lens, kv_lens, room)
    cuts = torch.arange(1, max_cuts(len(kv_lens)) + 1, device=kv_lens.device)
    lengths = (_cdiv(_cdiv(kv_lens.max().clamp(min=0), cuts), UNIT) * UNIT).clamp(min=MIN_PART)
    parts = _counts(kv_lens, lengths[:, None]).sum(1)
    cost = _cdiv(parts, programs) * (lengths + STARTUP)
    cost = cost.where((parts <= room) | (cuts == 1), torch.iinfo(cost.dtype).max >> 8)
    best = torch.argmin(cost * CUTS[1] + cuts - 1)  # of equals the fewest
    return cut(rows, kv_lens, lengths[best].expand(len(kv_lens)), room)


def cut(rows: Tensor, kv_lens: Tensor, lengths: Tensor, room: int) -> Tensor:
    """Parts of lengths [B] tokens of each request, the last one shorter, in order: int32 [room, FIELDS].

    A part: request, its row of the slot table, first token, end, which part of the request it is, of how many
    (1 of none for a request without tokens), two that are not used. Entries without a part have request -1;
    a request of -1 tokens has none.
    """
    counts = _counts(kv_lens, lengths.clamp(min=1))
    ends = counts.cumsum(0)
    entry = torch.arange(room, device=rows.device)
    request = torch.searchsorted(ends, entry, right=True)
    parts = torch.full((room, FIELDS), -1, dtype=torch.int32, device=rows.device)
    if not len(rows):
        return parts
    live, request = request < len(rows), request.clamp(max=len(rows) - 1)
    index = entry - (ends - counts)[request]
    start = index * lengths[request]
    end = torch.minimum(start + lengths[request], kv_lens[request])
    fields = (request, rows[request], start, end, index, counts[request])
    parts[:, : len(fields)] = torch.where(live[:, None], torch.stack(fields, 1), -1).int()
    return parts


def _counts(kv_lens: Tensor, lengths: Tensor) -> Tensor:
    """Parts of each request."""
    return _cdiv(kv_lens, lengths).clamp(min=1).where(kv_lens >= 0, 0)


def _cdiv(x: Tensor, y: Tensor | int) -> Tensor:
    return (x + y - 1) // y
