"""Qwen3 (dense): Llama's shape with an RMSNorm over each head of q and k before RoPE."""

from qrt.arch.base import Arch
from qrt.arch.qwen2 import DEFAULTS
from qrt.arch.qwen_layers import upper_window

QWEN3 = Arch(
    "Qwen3ForCausalLM",
    {**DEFAULTS, "head_dim": 128},
    mlp_bias=lambda config: False,
    sliding_window=upper_window,
    qk_norm=True,
)
