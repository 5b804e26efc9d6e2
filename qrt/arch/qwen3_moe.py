"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the mlp, in every layer of the released ones."""

from qrt.arch.base import Mixture
from qrt.arch.qwen3 import QWEN3

QWEN3_MOE = Mixture(
    "Qwen3MoeForCausalLM",
    QWEN3,
    counts=("num_experts", "num_local_experts"),  # as released, and as transformers 5 saves it
    width="moe_intermediate_size",
    all_sparse=lambda config: config.get("decoder_sparse_step", 1) == 1 and not config.get("mlp_only_layers"),
)
