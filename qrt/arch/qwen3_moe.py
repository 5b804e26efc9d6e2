"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the mlp, in every layer of the released ones."""

from dataclasses import replace

from qrt.arch.base import Mixture
from qrt.arch.qwen3 import QWEN3
from qrt.arch.qwen_layers import all_sparse, listed_window

DEFAULTS = {"hidden_size": 2048, "num_hidden_layers": 24, "decoder_sparse_step": 1}
SIZES = {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "head_dim": None}

QWEN3_MOE = Mixture(
    "Qwen3MoeForCausalLM",
    replace(
        QWEN3,
        defaults={**QWEN3.defaults, **DEFAULTS, **SIZES},
        sliding_window=lambda config: listed_window({**config, "layer_types": None}, True),
    ),
    width="moe_intermediate_size",
    counts=("num_local_experts", "num_experts"),  # transformers 5 saves the first
    all_sparse=all_sparse,
)
