"""Sizes of well-known models, as config.json entries, for runs on random weights."""

from __future__ import annotations

from typing import Any

from qrt.arch import ARCHS, ModelConfig
from qrt.errors import ConfigError
from qrt.registry import nearest

_LLAMA_3 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": (
        "LlamaForCausalLM",
        _LLAMA_3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "llama-3-70b": (
        "LlamaForCausalLM",
        _LLAMA_3
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "qwen3-8b": (
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
            "dtype": "bfloat16",
        },
    ),
}


def shape(name: str) -> ModelConfig:
    """The config of a known shape; ConfigError lists the known ones."""
    if name not in SHAPES:
        known = list(SHAPES)
        raise ConfigError(f"--shape {name}: unknown (known: {', '.join(known)}){nearest(name, known)}")
    architecture, config = SHAPES[name]
    return ModelConfig.from_hf(config, ARCHS[architecture])
