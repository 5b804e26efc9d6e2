"""Ai2's OLMo: 1 with norms without weights, 2 and 3 with norms behind the blocks only; OLMoE with experts."""

from __future__ import annotations

from typing import Any

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import MAX_LAYERS, Entries, number, optional, positive, typed
from qrt.arch.experts import Experts, RouterConfig
from qrt.arch.families.llama import DEFAULTS, each, llama, sparse, windows
from qrt.arch.rope import parameters, rope_of

BEHIND = Names(
    attention_in=None, attention_out="post_attention_layernorm", mlp_in=None,
    mlp_out="post_feedforward_layernorm",
)  # fmt: skip


def olmo(c: Entries) -> Arch:
    """OLMo 1."""
    c = c.filled(vocab_size=50304)
    return llama(c, norm=Norm(1e-5, "unit"), clip=optional(c, "clip_qkv"), mlp_bias=False)


def olmoe(c: Entries) -> Arch:
    """OLMoE: a norm over all heads of q and k, and experts in every layer."""
    c = c.filled(vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16)
    c = c.filled(num_attention_heads=16, max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64)
    c = c.filled(num_experts_per_tok=8, norm_topk_prob=False)
    arch = llama(c, qk_norm="whole", clip=optional(c, "clip_qkv"), mlp_bias=False)
    router = RouterConfig(positive(c, "num_experts_per_tok"), renormalize=typed(c, "norm_topk_prob", bool))
    return sparse(arch, Experts(positive(c, "num_experts", most=MAX_LAYERS), arch.intermediate_size, router))


def olmo2(c: Entries, **changes: Any) -> Arch:
    """OLMo 2: a norm over all heads of q and k."""
    c = c.filled(vocab_size=50304, rms_norm_eps=1e-5)
    norm = Norm(number(c, "rms_norm_eps"), wide=True)
    return llama(c, **{"names": BEHIND, "qk_norm": "whole", "norm": norm, "mlp_bias": False} | changes)


def olmo3(c: Entries) -> Arch:
    """OLMo 3: three sliding layers for each full one, whose RoPE alone is stretched."""
    c = c.filled(sliding_window=4096, rope_theta=5e5, **{"max_position_embeddings": 2048})
    entry, longest = parameters(c), positive(c, "max_position_embeddings")
    sizes = c.filled(**DEFAULTS)
    dim = positive(sizes, "hidden_size") // positive(sizes, "num_attention_heads")
    if "full_attention" in entry:
        local, whole = entry["sliding_attention"], entry["full_attention"]
    else:
        local, whole = {key: entry[key] for key in ("rope_theta",) if key in entry}, entry
    stretched, longest = rope_of(c, whole, dim, longest)
    ropes = {"local": rope_of(c, {"rope_type": "default", **local}, dim, longest)[0], "all": stretched}
    arch = olmo2(c, layers=windows(c, lambda i: (i + 1) % 4 != 0), ropes=ropes, max_position=longest)
    return each(arch, lambda i, layer: {"rope": "local" if layer.window else "all"})
