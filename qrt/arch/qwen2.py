"""Qwen2 and Qwen2.5 (dense): Llama's shape with a bias on q, k and v only.

The upper layers (from `max_window_layers`, or as `layer_types` lists them) slide a window when the config
turns it on; no released one does.
"""

from collections.abc import Mapping
from typing import Any

from qrt.arch.base import Arch, optional


def window(config: Mapping[str, Any]) -> int | None:
    """The window in tokens if any layer slides it."""
    if not config.get("use_sliding_window"):
        return None
    kinds, first = optional(config, "layer_types", list), optional(config, "max_window_layers", int)
    slides = (28 if first is None else first) < config["num_hidden_layers"]
    slides = slides if kinds is None else "sliding_attention" in kinds
    return config.get("sliding_window", 4096) if slides else None


QWEN2 = Arch(
    "Qwen2ForCausalLM",
    qkv_bias=lambda config: True,
    o_bias=lambda config: False,
    mlp_bias=lambda config: False,
    sliding_window=window,
)
