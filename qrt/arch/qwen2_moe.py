"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with a mixture of experts beside one that all tokens go through."""

from dataclasses import replace

from qrt.arch.base import Mixture
from qrt.arch.entries import typed
from qrt.arch.qwen2 import QWEN2
from qrt.arch.qwen3_moe import DEFAULTS
from qrt.arch.qwen_layers import all_sparse, listed_window

SIZES = {"num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408}
QWEN2_MOE = Mixture(
    "Qwen2MoeForCausalLM",
    replace(
        QWEN2,
        defaults={**QWEN2.defaults, **DEFAULTS, **SIZES, "num_experts": 60, "qkv_bias": True},
        qkv_bias=lambda config: typed(config, "qkv_bias", bool),
        # every other layer below `max_window_layers` slides a window
        sliding_window=lambda config: listed_window(config, typed(config, "max_window_layers", int) > 0),
    ),
    width="moe_intermediate_size",
    all_sparse=all_sparse,
    routers=("mlp.gate", "mlp.shared_expert_gate"),
    shared="mlp.shared_expert",
)
