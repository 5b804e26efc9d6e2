"""Mixtral: Mistral with a mixture of experts in place of the mlp."""

from qrt.arch.base import Mixture
from qrt.arch.mistral import MISTRAL

MIXTRAL = Mixture(
    "MixtralForCausalLM",
    MISTRAL,
    width="intermediate_size",
    counts=("num_local_experts",),
    all_sparse=lambda config: True,
    routers=("block_sparse_moe.gate",),
    experts="block_sparse_moe.experts",
    parts=("w1", "w3", "w2"),
)
