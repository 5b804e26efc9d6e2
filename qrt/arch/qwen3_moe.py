"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the mlp, in every layer of the released ones."""

from collections.abc import Mapping
from typing import Any

from qrt.arch.base import Mixture
from qrt.arch.qwen3 import QWEN3


def all_sparse(config: Mapping[str, Any]) -> bool:
    """Whether every layer is a mixture."""
    return config.get("decoder_sparse_step", 1) == 1 and not config.get("mlp_only_layers")


QWEN3_MOE = Mixture(
    "Qwen3MoeForCausalLM",
    QWEN3,
    width="moe_intermediate_size",
    all_sparse=all_sparse,
)
