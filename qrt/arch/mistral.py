"""Mistral 7B and its dense successors: Llama's shape without biases; v0.1 slides a window in every layer."""

from qrt.arch.base import Arch

MISTRAL = Arch(
    "MistralForCausalLM",
    qkv_bias=lambda config: False,
    o_bias=lambda config: False,
    mlp_bias=lambda config: False,
    sliding_window=lambda config: config.get("sliding_window", 4096),
)
