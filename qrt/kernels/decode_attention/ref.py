"""`decode_attention` from its definition, in fp32, and `append_attention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.kernels.attention_rule import AttentionRule, softmax, weigh
from qrt.kernels.decode_attention.blocks import refuse_others
from qrt.kernels.kv_write.ref import kv_write
from qrt.quant.digits import Digits
from qrt.quant.kv import KV_FORMATS

GATHER_TOKENS = 1 << 13  # decoded at a time: keeps the fp32 copy of K and V small and in the CPU's cache


def decode_attention(
    q: Tensor,
    kv: Sequence[Tensor],
    slot_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    kv_splits: Tensor,
    out: Tensor,
    format: str,
    scale: float,
    newest: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    segment: int = 0,
) -> None:
    """See the package's docstring; `kv_splits` and `newest` do not matter here."""
    longest = int(kv_lens.max()) if len(kv_lens) else 0
    many = max(1, GATHER_TOKENS // max(longest, 1))
    attending = (kv_lens >= 0).nonzero()[:, 0]
    for part in attending.split(many) if len(attending) else ():
        slots = slot_table[rows[part], : int(kv_lens[part].max())]
        rule = AttentionRule(scale, window, softcap=softcap, slopes=slopes, sinks=sinks, segment=segment)
        out[part] = _attend(q[part], kv, slots, kv_lens[part], format, rule).to(out.dtype)


def _attend(
    q: Tensor, kv: Sequence[Tensor], slots: Tensor, kv_lens: Tensor, format: str, rule: AttentionRule
) -> Tensor:
    """Return fp32 [B, Hq, D]: q [B, Hq, D] attends the first kv_lens [B] of slots [B, L]."""
    fmt = KV_FORMATS[format]
    B, L = slots.shape
    query, token = kv_lens[:, None] - 1, torch.arange(L, device=q.device)
    live = (token <= query) & (token >= rule.first(query))
    own = slots.gather(1, (kv_lens.long() - 1).clamp(min=0)[:, None])[:, :L] if L else slots
    # entries past the end need not be slots, nor those before the window
    slots = slots.where(live, own.where(kv_lens[:, None] > 0, 0))
    k, v = (x.unflatten(0, (B, L)).transpose(1, 2) for x in fmt.decode_ref(kv, slots.flatten()))
    queries = q.float().unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, D]
    slopes = None if rule.slopes is None else rule.slopes.view(k.shape[1], -1, 1)
    scores = queries @ k.mT * rule.scale
    scores = weigh(scores, query[:, None, None], token, rule, slopes)
    sinks = None if rule.sinks is None else rule.sinks.view(k.shape[1], -1)
    values = fmt.from_basis((softmax(scores, sinks) @ v).flatten(1, 2))
    return values.masked_fill(~live.any(1)[:, None, None], 0.0)


def append_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Sequence[Tensor],
    smoothing: Tensor | None,
    slot_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    kv_splits: Tensor,
    out: Sequence[Tensor],
    format: str,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    rope_positions: Tensor | None = None,
    segment: int = 0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See the package's docstring."""
    refuse_others(format)
    live = kv_lens > 0
    positions = kv_lens[live].long() - 1
    angles = positions if rope_positions is None else rope_positions[live].long()
    slots = slot_table[rows[live].long(), positions].long()
    queries, norms = q[live], (q_norm, k_norm, eps)
    kv_write(queries, k[live], v[live], cos, sin, angles, slots, kv, smoothing, format, *norms)
    turned = q.clone()
    turned[live] = queries
    attended = out[0] if len(out) == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rule = window, softcap, slopes, sinks, segment
    decode_attention(turned, kv, slot_table, rows, kv_lens, kv_splits, attended, format, scale, True, *rule)
    if len(out) == 2:
        Digits(out[0], out[1], len(q)).write(attended.flatten(1))
