"""How the tokens of decoding requests are cut into parts that the GPU attends side by side.

A kernel's grid is fixed when a CUDA graph is captured, but the lengths are not. So the parts are a list on
the device, as long as the grid may need, and each program reads from its entry what to attend. Few entries
are without a part: to start a program that finds nothing to do takes an SM a quarter of a microsecond.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.gpu import multiprocessors

FIELDS = 8  # int32 per part: a sector of memory
UNIT = 64  # tokens; a part's length is a multiple of it, except for a request's last part
MIN_PART = 128  # tokens; a shorter part costs more to merge than it gains
STARTUP = 64  # the cost of starting and merging a part, in tokens attended
CUTS = (8, 128)  # most parts of a request: if there are many requests, if there are few
_CUTS_TIMES_REQUESTS = 1 << 13  # the most that one program can compare


def at_once(num_kv_heads: int, heads_per_sm: int, device: torch.device) -> int:
    """Return how many parts the GPU attends at a time, with all KV heads."""
    return max(1, heads_per_sm * multiprocessors(device) // num_kv_heads)


def max_parts(requests: int, num_kv_heads: int, heads_per_sm: int, device: torch.device) -> int:
    """Return the length of the list: one part per request, plus as many as the GPU attends at a time."""
    return requests + at_once(num_kv_heads, heads_per_sm, device)


def max_cuts(requests: int) -> int:
    """Return how many parts one request may be cut into."""
    return min(max(_CUTS_TIMES_REQUESTS // (1 << (max(requests, 1) - 1).bit_length()), CUTS[0]), CUTS[1])


def plan_kv_splits(
    rows: Tensor, kv_lens: Tensor, num_kv_heads: int, heads_per_sm: int, window: int = 0, segment: int = 0
) -> Tensor:
    """Return the parts of requests with kv_lens int32 [B] tokens at rows int32 [B]: [max_parts, FIELDS].

    With a `window` above 0 only the last `window` tokens of a request are in its parts, with a `segment` only
    those of the newest token's segment.

    Candidate lengths cut the longest request evenly; the one that finishes first is chosen. Programs run in
    waves of as many as the GPU holds (`DecodeBlock.heads_per_sm`), and a nearly empty last wave costs as much
    as a full one. This runs on the device without a sync, once per step for all layers.
    """
    if window or segment:
        passed = (kv_lens - 1).clamp(min=0) // segment * segment if segment else kv_lens - window
        seen = kv_lens - passed.clamp(min=0)
        kv_splits = plan_kv_splits(rows, seen, num_kv_heads, heads_per_sm)
        kv_splits[:, 2:4] += (kv_lens - seen)[kv_splits[:, 0].clamp(min=0).long(), None] if len(rows) else 0
        return kv_splits
    programs = at_once(num_kv_heads, heads_per_sm, kv_lens.device)
    room = max_parts(len(kv_lens), num_kv_heads, heads_per_sm, kv_lens.device)
    if not len(kv_lens):
        return cut(rows, kv_lens, kv_lens, room)
    cuts = torch.arange(1, max_cuts(len(kv_lens)) + 1, device=kv_lens.device)
    lengths = (_cdiv(_cdiv(kv_lens.max().clamp(min=0), cuts), UNIT) * UNIT).clamp(min=MIN_PART)
    kv_splits = _counts(kv_lens, lengths[:, None]).sum(1)
    cost = _cdiv(kv_splits, programs) * (lengths + STARTUP)
    cost = cost.where((kv_splits <= room) | (cuts == 1), torch.iinfo(cost.dtype).max >> 8)
    best = torch.argmin(cost * CUTS[1] + cuts - 1)  # the fewest cuts if costs are equal
    return cut(rows, kv_lens, lengths[best].expand(len(kv_lens)), room)


def cut(rows: Tensor, kv_lens: Tensor, lengths: Tensor, room: int) -> Tensor:
    """Cut requests into parts of lengths [B] tokens, the last one shorter: int32 [room, FIELDS], in order.

    The fields of a part are the request, its row of the slot table, the part's first token and end, its index
    among the request's parts, their number, and two that are not used. A request without tokens has one empty
    part, a request of -1 tokens none. Entries without a part have request -1.
    """
    counts = _counts(kv_lens, lengths.clamp(min=1))
    ends = counts.cumsum(0)
    entry = torch.arange(room, device=rows.device)
    request = torch.searchsorted(ends, entry, right=True)
    kv_splits = torch.full((room, FIELDS), -1, dtype=torch.int32, device=rows.device)
    if not len(rows):
        return kv_splits
    live, request = request < len(rows), request.clamp(max=len(rows) - 1)
    index = entry - (ends - counts)[request]
    start = index * lengths[request]
    end = torch.minimum(start + lengths[request], kv_lens[request])
    fields = (request, rows[request], start, end, index, counts[request])
    kv_splits[:, : len(fields)] = torch.where(live[:, None], torch.stack(fields, 1), -1).int()
    return kv_splits


def _counts(kv_lens: Tensor, lengths: Tensor) -> Tensor:
    """Return the number of parts of each request."""
    return _cdiv(kv_lens, lengths).clamp(min=1).where(kv_lens >= 0, 0)


def _cdiv(x: Tensor, y: Tensor | int) -> Tensor:
    return (x + y - 1) // y
