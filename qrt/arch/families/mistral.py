"""Mistral's models: Llama's shape without biases; some slide windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qrt.arch.base import Arch
from qrt.arch.entries import MAX_LAYERS, Entries, number, positive
from qrt.arch.experts import Experts, RouterConfig
from qrt.arch.families.llama import llama, sparse, windows
from qrt.arch.layer import QScale
from qrt.arch.rope import parameters

DEFAULTS = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
UNBIASED = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral(c: Entries, **changes: Any) -> Arch:
    """Mistral 7B and its dense successors: version 0.1 slides a window in every layer."""
    c = c.filled(sliding_window=4096, **DEFAULTS)
    return llama(c, layers=windows(c, lambda i: True, listed=False), **UNBIASED, **changes)


def ministral(c: Entries) -> Arch:
    """Ministral 8B: `layer_types` says which layers slide."""
    c = c.filled(sliding_window=4096, **DEFAULTS)
    return llama(c, layers=windows(c, lambda i: True), **UNBIASED)


def ministral3(c: Entries) -> Arch:
    """Ministral 3: q grows with its position."""
    c = c.filled(
        vocab_size=131072, num_hidden_layers=34, head_dim=128, rms_norm_eps=1e-5, sliding_window=None
    )
    c = c.filled(rope_parameters=YARN, **DEFAULTS | {"max_position_embeddings": 262144})
    arch, entry = mistral(c), parameters(c)
    if entry.get("llama_4_scaling_beta") is None:
        return arch
    length = positive(entry, "original_max_position_embeddings")
    return replace(arch, q_scale=QScale(number(entry, "llama_4_scaling_beta"), length))


MIXTRAL: dict[str, Any] = {
    "module": "block_sparse_moe.experts",
    "parts": ("w1", "w3", "w2"),
    "gate": "block_sparse_moe.gate",
}


def mixtral(c: Entries) -> Arch:
    """Mixtral: Mistral with a mixture of experts in place of every mlp."""
    c = c.filled({"num_local_experts": "num_experts"}, num_local_experts=8, sliding_window=None)
    c = c.filled(rms_norm_eps=1e-5, rope_theta=1e6, num_experts_per_tok=2)
    arch = mistral(c)
    experts = Experts(
        positive(c, "num_local_experts", most=MAX_LAYERS),
        arch.intermediate_size,
        RouterConfig(positive(c, "num_experts_per_tok"), "top"),
        **MIXTRAL,
    )
    return sparse(arch, experts)
