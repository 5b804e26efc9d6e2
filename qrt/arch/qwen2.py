"""Qwen2 and Qwen2.5 (dense): Llama's shape with a bias on q, k and v only.

The config can turn on a sliding window; no released one does.
"""

from qrt.arch.base import Arch
from qrt.arch.qwen_layers import upper_window

DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2 = Arch(
    "Qwen2ForCausalLM",
    DEFAULTS,
    qkv_bias=lambda config: True,
    o_bias=lambda config: False,
    mlp_bias=lambda config: False,
    sliding_window=upper_window,
)
