"""Mistral 7B and its dense successors: Llama's shape without biases; v0.1 slides a window in every layer."""

from qrt.arch.base import Arch

MISTRAL = Arch(
    "MistralForCausalLM",
    {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    qkv_bias=lambda config: False,
    o_bias=lambda config: False,
    mlp_bias=lambda config: False,
    sliding_window=lambda config: config["sliding_window"],
)
