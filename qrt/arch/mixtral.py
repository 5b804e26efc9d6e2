"""Mixtral: Mistral with a mixture of experts in place of the mlp."""

from dataclasses import replace

from qrt.arch.base import Mixture
from qrt.arch.mistral import MISTRAL

DEFAULTS = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts": 8}
MIXTRAL = Mixture(
    "MixtralForCausalLM",
    replace(MISTRAL, defaults={**MISTRAL.defaults, **DEFAULTS}),
    width="intermediate_size",
    counts=("num_experts", "num_local_experts"),
    all_sparse=lambda config: True,
    routers=("block_sparse_moe.gate",),
    experts="block_sparse_moe.experts",
    parts=("w1", "w3", "w2"),
)
