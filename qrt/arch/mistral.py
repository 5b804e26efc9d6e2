"""Mistral 7B and its dense successors: Llama's shape; v0.1 slides a window over every layer."""

from qrt.arch.base import Arch

MISTRAL = Arch("MistralForCausalLM", sliding_window=lambda config: config.get("sliding_window", 4096))
