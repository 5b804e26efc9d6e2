"""decode_attention from its definition, in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.quant.kv import KV_FORMATS

GATHER_TOKENS = 1 << 13  # decoded at a time: bounds the fp32 copy of K and V and keeps it in cache


def decode_attention(
    q: Tensor,
    kv: Sequence[Tensor],
    slot_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    parts: Tensor,
    format: str,
    scale: float,
) -> Tensor:
    """See the package's docstring; `parts` do not matter here."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    longest = int(kv_lens.max()) if len(kv_lens) else 0
    many = max(1, GATHER_TOKENS // max(longest, 1))
    for first in range(0, len(q), many):
        part = slice(first, first + many)
        length = int(kv_lens[part].max())
        slots = slot_table[rows[part], :length]
        out[part] = _attend(q[part], kv, slots, kv_lens[part], format, scale)[0]
    return out


def decode_attention_parts(
    q: Tensor, kv: Sequence[Tensor], slot_table: Tensor, parts: Tensor, format: str, scale: float
) -> tuple[Tensor, Tensor]:
    """See the package's docstring."""
    partial = torch.zeros(len(parts), *q.shape[1:], device=q.device)
    lse = torch.zeros(partial.shape[:2], device=q.device)
    for entry, (request, row, start, end, *_) in enumerate(parts.tolist()):
        if start < end:
            slots, live = slot_table[None, row, start:end], parts.new_tensor([end - start])
            each = _attend(q[request, None], kv, slots, live, format, scale)
            partial[entry], lse[entry] = each[0][0], each[1][0]
    return partial, lse


def merged(partial: Tensor, lse: Tensor, parts: Tensor, requests: int) -> Tensor:
    """Parts fp32 [P, Hq, D] with base-2 log-sum-exp [P, Hq] -> what each request attended, [B, Hq, D]."""
    live = parts[:, 0] >= 0
    request, partial, lse = parts[live, 0].long(), partial[live], lse[live]
    highest = lse.new_full((requests, lse.shape[1]), -torch.inf)
    highest = highest.scatter_reduce(0, request[:, None].expand_as(lse), lse, "amax")
    weight = torch.exp2(lse - highest[request])
    total = torch.zeros_like(highest).index_add(0, request, weight)
    sums = partial.new_zeros(requests, *partial.shape[1:])
    return sums.index_add(0, request, partial * weight[..., None]) / total[..., None]


def _attend(
    q: Tensor, kv: Sequence[Tensor], slots: Tensor, kv_lens: Tensor, format: str, scale: float
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, D], slots [B, L] of which the first kv_lens [B] count -> fp32 [B, Hq, D] and the base-2
    log-sum-exp of their logits [B, Hq]."""
    fmt = KV_FORMATS[format]
    B, L = slots.shape
    live = torch.arange(L, device=q.device) < kv_lens[:, None]
    own = slots[:, :1].where(live[:, :1], 0)
    slots = slots.where(live, own)  # what lies past the end need not be a slot
    k, v = (x.unflatten(0, (B, L)).transpose(1, 2) for x in fmt.decode_ref(kv, slots.flatten()))
    queries = q.float().unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, D]
    scores = (queries @ k.mT * scale).masked_fill(~live[:, None, None], -torch.inf)
    values = fmt.from_basis((torch.softmax(scores, -1) @ v).flatten(1, 2))
    lse = torch.logsumexp(scores, -1).flatten(1) * math.log2(math.e)
    return values.masked_fill(~live.any(1)[:, None, None], 0.0), lse
