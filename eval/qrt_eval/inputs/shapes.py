"""List the sizes of well-known models, as entries of config.json, for runs with random weights.

`python -m qrt_eval.inputs.shapes llama-3-8b w8a8 FOLDER [HEAD_BITS]` writes a folder that has everything but
the weights, for `qrt-serve FOLDER --load-format dummy`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from qrt.arch import Arch
from qrt.arch.read import read_arch
from qrt.assets import model_path
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
    "qwen2.5-7b": (
        "Qwen2ForCausalLM",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 32768,
        },
    ),
    "mistral-small-24b": (
        "MistralForCausalLM",
        {
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "head_dim": 128,
            "sliding_window": None,
            "rope_theta": 1e8,
            "max_position_embeddings": 32768,
        },
    ),
    "phi-4": (
        "Phi3ForCausalLM",
        {
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "rope_theta": 250000.0,
            "max_position_embeddings": 16384,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeForCausalLM",
        _QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
    ),
    "mixtral-8x7b": (
        "MixtralForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
        },
    ),
    "gpt-oss-20b": (
        "GptOssForCausalLM",
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "dtype": "bfloat16"},
    ),
    "glm-4-9b": ("GlmForCausalLM", {}),
    "gemma-2-9b": (
        "Gemma2ForCausalLM",
        {
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    ),
    "gemma-3-27b": (
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "max_position_embeddings": 131072,
        },
    ),
}


def shape(name: str) -> Arch:
    """Return the config of a known shape; ConfigError lists the known ones."""
    architecture, config = _entry(name)
    return read_arch({"architectures": [architecture], **config}, name)


def _entry(name: str) -> tuple[str, dict[str, Any]]:
    if name not in SHAPES:
        known = list(SHAPES)
        raise ConfigError(f"--shape: expected one of {', '.join(known)}, got {name!r}{nearest(name, known)}")
    return SHAPES[name]


def write_folder(name: str, scheme: str, folder: Path, head_bits: int = 16) -> None:
    """Write config.json of a known shape with layers in `scheme` and a head of `head_bits`, and a tokenizer.

    In mxfp4 the config is that of gpt-oss as it is published: only experts are quantized. ConfigError for a
    shape without stacked experts, and for a quantized head. The tokenizer is the bundled model's. Made-up
    words fill it up to the shape's vocabulary.
    """
    from qrt.quant.checkpoint.compressed_tensors import quantization_config
    from qrt.quant.spec import Codes
    from qrt.quant.weight import WEIGHT_SCHEMES  # imported here because they import torch
    from qrt.quant.weight.head import head_grid

    architecture, config = _entry(name)
    arch, (head_scheme, head_spec) = shape(name), head_grid(scheme, head_bits)
    kind = architecture.removesuffix("ForCausalLM").lower()  # transformers' name of the architecture
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    config = {"architectures": [architecture], "model_type": kind, **ends, **config}
    spec = WEIGHT_SCHEMES[scheme].spec
    if head_spec is not None:
        config["tie_word_embeddings"] = False
    if spec is not None and spec.codes is not Codes.INTEGERS:
        config["quantization_config"] = _as_published(name, scheme, head_bits)
    elif spec is not None:
        overrides = {} if head_spec is None else {arch.names.head: (head_scheme, head_spec)}
        ignore = [] if overrides else [arch.names.head]
        config["quantization_config"] = quantization_config(scheme, spec, ignore, {}, overrides)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tiny = model_path("tiny")
    assert tiny is not None
    shutil.copy(tiny / "tokenizer_config.json", folder)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab |= {f"\u0120w{i:06}": i for i in range(arch.vocab_size) if i not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _as_published(name: str, scheme: str, head_bits: int) -> dict[str, Any]:
    """Return the quantization_config of gpt-oss; its quant_method is called as the scheme."""
    experts = shape(name).experts
    if experts is None or experts.stacked is None:
        raise ConfigError(
            f"weights {scheme}: expected a shape with stacked experts (gpt-oss-20b), got {name}"
        )
    if head_bits != 16:
        raise ConfigError(f"--head-bits: expected 16 beside {scheme}, got {head_bits}")
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"quant_method": scheme, "modules_to_not_convert": left}


if __name__ == "__main__":
    write_folder(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
