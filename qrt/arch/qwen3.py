"""Qwen3 (dense): Llama's shape with an RMSNorm over each head of q and k before RoPE."""

from qrt.arch.base import Arch
from qrt.arch.qwen2 import window

QWEN3 = Arch("Qwen3ForCausalLM", mlp_bias=lambda config: False, sliding_window=window, qk_norm=True)
