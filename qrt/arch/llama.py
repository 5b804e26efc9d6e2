"""Llama 1 to 3.x: no biases unless the config says so."""

from qrt.arch.base import Arch

LLAMA = Arch("LlamaForCausalLM")
