"""Gemma 1 to 3: norm weights stored around zero, scaled embeddings; from 2 on norms behind the blocks."""

from __future__ import annotations

import math
from typing import Any

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import Entries, number, optional, positive, typed
from qrt.arch.families.llama import activation, each, llama, windows
from qrt.arch.rope import parameters, rope_of

DEFAULTS = {
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SECOND = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
SANDWICH = Names(
    attention_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)


def gemma(c: Entries, **changes: Any) -> Arch:
    """Gemma 1."""
    c = c.filled(hidden_size=3072, intermediate_size=24576, num_hidden_layers=28, num_attention_heads=16)
    c = c.filled(num_key_value_heads=16, hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-6, **DEFAULTS)
    if "act" not in changes:  # early configs say "gelu" and mean its tanh form
        named = activation(c, "hidden_act" if c.get("hidden_activation") is None else "hidden_activation")
        changes["act"] = "gelu_tanh" if named == "gelu" else named
    norm = Norm(number(c, "rms_norm_eps"), plus=1.0, wide=True)
    scale = math.sqrt(positive(c, "hidden_size"))
    return llama(c, **{"norm": norm, "embed_scale": scale, "mlp_bias": False} | changes)


def gemma2(c: Entries, **changes: Any) -> Arch:
    """Gemma 2: every other layer slides; scores and logits are capped."""
    c = c.filled(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, sliding_window=4096)
    c = c.filled(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, num_key_value_heads=4)
    c = c.filled(**SECOND, **DEFAULTS)
    known = {
        "names": SANDWICH,
        "layers": windows(c, lambda i: i % 2 == 0),
        "act": activation(c, "hidden_activation"),
        "attention_scale": number(c, "query_pre_attn_scalar") ** -0.5,
        "softcap": optional(c, "attn_logit_softcapping"),
        "logit_cap": optional(c, "final_logit_softcapping"),
    }
    return gemma(c, **known | changes)


def gemma3(c: Entries, **changes: Any) -> Arch:
    """Gemma 3: five sliding layers, with a RoPE of their own, for each full one; norms of q and k."""
    c = c.filled(vocab_size=262208, max_position_embeddings=131072, sliding_window_pattern=6)
    c = c.filled(attn_logit_softcapping=None, final_logit_softcapping=None, rope_local_base_freq=1e4)
    c = c.filled(head_dim=256, rope_theta=1e6, sliding_window=4096, **SECOND)
    entry, longest, dim = parameters(c), positive(c, "max_position_embeddings"), positive(c, "head_dim")
    local, whole = {"rope_theta": number(c, "rope_local_base_freq")}, entry
    if "full_attention" in entry:
        local, whole = entry["sliding_attention"], entry["full_attention"]
    ropes = {
        "local": rope_of(c, {"rope_type": "default", **local}, dim, longest)[0],
        "all": rope_of(c, whole, dim, longest)[0],
    }
    every = typed(c, "sliding_window_pattern", int)
    layers = windows(c, lambda i: (i + 1) % every != 0)
    arch = gemma2(c, **{"qk_norm": "head", "layers": layers, "ropes": ropes} | changes)
    return each(arch, lambda i, layer: {"rope": "local" if layer.window else "all"})
