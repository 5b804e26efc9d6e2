"""OpenAI's gpt-oss: experts in every layer, sinks, and windows in every other layer."""

from __future__ import annotations

from typing import Any

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import MAX_LAYERS, Entries, expect, number, positive
from qrt.arch.experts import Experts, RouterConfig, Stacked
from qrt.arch.families.llama import llama, sparse, windows

DEFAULTS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "num_experts": 128,
    "num_experts_per_tok": 4,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(c: Entries) -> Arch:
    """gpt-oss 20B and 120B. Gate and up of an expert are even and odd columns; their limit is fixed."""
    c = c.filled({"num_experts": "num_local_experts"}, rope_parameters=YARN, **DEFAULTS)
    expect(c, "hidden_act", "silu")
    expect(c, "swiglu_limit", 7.0)
    arch = llama(
        c, names=Names(sinks="self_attn.sinks"), layers=windows(c, lambda i: i % 2 == 0), act="swiglu_oai",
        norm=Norm(number(c, "rms_norm_eps"), wide=True), mlp_bias=False,
    )  # fmt: skip
    experts = Experts(
        positive(c, "num_experts", most=MAX_LAYERS), arch.intermediate_size,
        RouterConfig(positive(c, "num_experts_per_tok"), "top"), stacked=Stacked(transposed=True, pairs=True),
        bias=True, gate="mlp.router", gate_bias=True,
    )  # fmt: skip
    return sparse(arch, experts)
