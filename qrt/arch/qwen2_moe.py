"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with a mixture of experts beside one that all tokens go through."""

from qrt.arch.base import Mixture
from qrt.arch.qwen2 import QWEN2
from qrt.arch.qwen3_moe import all_sparse

QWEN2_MOE = Mixture(
    "Qwen2MoeForCausalLM",
    QWEN2,
    width="moe_intermediate_size",
    all_sparse=all_sparse,
    routers=("mlp.gate", "mlp.shared_expert_gate"),
    shared="mlp.shared_expert",
)
