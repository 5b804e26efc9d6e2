"""`prefill_attention` from its definition, in fp32, a chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from qrt.kernels.attention_rule import AttentionRule, softmax, weigh
from qrt.quant.kv import KV_FORMATS

QUERIES = 256  # rows of the score matrix at a time


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Sequence[Tensor],
    slot_table: Tensor,
    rows: Tensor,
    query_start: Tensor,
    cached_start: Tensor,
    tiles: Tensor,
    out: Tensor,
    num_cached: int,
    attend_cache: bool,
    format: str,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    segment: int = 0,
) -> None:
    """See the package's docstring; `tiles` and `num_cached` do not matter here."""
    fmt = KV_FORMATS[format]
    rule = AttentionRule(scale, window, softcap=softcap, slopes=slopes, sinks=sinks, segment=segment)
    chunks = zip(rows.tolist(), pairwise(query_start.tolist()), cached_start.diff().tolist(), strict=True)
    for row, bounds, cached in chunks:
        chunk = slice(*bounds)
        if chunk.start == chunk.stop:
            continue
        keys, values = fmt.decode_ref(kv, slot_table[row, :cached])
        if not attend_cache:
            keys, values = torch.cat((keys, k[chunk].float())), torch.cat((values, v[chunk].float()))
        attended = causal_attention(q[chunk].float(), keys, values, rule)
        out[chunk] = fmt.from_basis(attended)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Attend q [n, Hq, D], the last n of the L positions of k, v [L, Hkv, D] -> [n, Hq, D]; all fp32."""
    n, L = len(q), len(k)
    q = q * rule.scale
    k, v = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]  # [Hkv, 1, L, D]
    queries = q.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    position = torch.arange(L - n, L, device=q.device)
    slopes = None if rule.slopes is None else rule.slopes.view(k.shape[0], -1, 1, 1)
    sinks = None if rule.sinks is None else rule.sinks.view(k.shape[0], -1, 1)
    parts = []
    for some, at in zip(queries.split(QUERIES, 2), position.split(QUERIES), strict=True):
        seen = int(at[-1]) + 1  # no query of this block sees more
        first = max(0, int(rule.first(at[0])))  # nor less far back
        token = torch.arange(first, seen, device=q.device)
        scores = weigh(some @ k[..., first:seen, :].mT, at[:, None], token, rule, slopes)
        parts.append(softmax(scores, sinks) @ v[..., first:seen, :])
    return torch.cat(parts, 2).permute(2, 0, 1, 3).flatten(1, 2)
