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
_QWEN3 = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": (
        "LlamaForCausalLM",
        _LLAMA_3
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
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
    "mistral-7b": (  # v0.3
        "MistralForCausalLM",
        {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
            "sliding_window": None,
            "dtype": "bfloat16",
        },
    ),
    "qwen3-0.6b": (
        "Qwen3ForCausalLM",
        _QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": (
        "Qwen3ForCausalLM",
        _QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
    ),
    "qwen3-32b": (
        "Qwen3ForCausalLM",
        _QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
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
