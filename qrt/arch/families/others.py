"""Families of one or two facts each: multipliers, layers without positions, other norms or activations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import Entries, expect, number, positive, typed
from qrt.arch.families.alibi import slopes
from qrt.arch.families.llama import each, full, llama, neighbours, windows
from qrt.arch.families.olmo import BEHIND
from qrt.errors import CheckpointError

UNBIASED = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
SECOND_VOCABULARY = 125696  # of Baichuan 2, which normalizes the rows of its head
SMALL = 4096  # hidden size of Baichuan 7B


def granite(c: Entries, **changes: Any) -> Arch:
    """IBM Granite 3: four multipliers."""
    c = c.filled(
        embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0, logits_scaling=1.0
    )
    return llama(
        c,
        embed_scale=number(c, "embedding_multiplier"),
        residual_scale=number(c, "residual_multiplier"),
        attention_scale=number(c, "attention_multiplier"),
        logit_scale=1 / number(c, "logits_scaling"),
        **changes,
    )


def minicpm(c: Entries) -> Arch:
    """MiniCPM 1 and 2."""
    for granite_name in (
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
    ):
        c.get(granite_name)  # the same facts, in converted checkpoints
    arch = llama(c, embed_scale=number(c, "scale_emb", 1.0), mlp_bias=False)
    residual = number(c, "scale_depth", 1.0) / math.sqrt(arch.num_layers)
    base = positive(c, "dim_model_base", arch.hidden_size)
    return replace(arch, residual_scale=residual, logit_scale=base / arch.hidden_size)


def smollm3(c: Entries) -> Arch:
    """SmolLM 3: every fourth layer has no positions."""
    c = c.filled(vocab_size=128256, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16)
    c = c.filled(
        num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6, tie_word_embeddings=True
    )
    c = c.filled(no_rope_layer_interval=4, use_sliding_window=False, sliding_window=None)
    every, listed = positive(c, "no_rope_layer_interval"), typed(c, "no_rope_layers", list, None)
    layers = windows(c, lambda i: True) if typed(c, "use_sliding_window", bool) else full(c)
    turns = [bool((i + 1) % every) for i in range(len(layers))] if listed is None else listed
    if len(turns) != len(layers):
        raise CheckpointError(
            f"config.json: expected no_rope_layers for {len(layers)} layers, got {len(turns)}"
        )
    return each(llama(c, layers=layers), lambda i, layer: {"rope": "all" if turns[i] else None})


def seed_oss(c: Entries) -> Arch:
    """ByteDance Seed-OSS: biases on q, k and v alone."""
    c = c.filled(vocab_size=155136, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=80)
    c = c.filled(num_key_value_heads=8, head_dim=128, max_position_embeddings=524288)
    c = c.filled(attention_bias=True, attention_out_bias=False)
    return llama(c, o_bias=typed(c, "attention_out_bias", bool))


def ernie(c: Entries) -> Arch:
    """Baidu Ernie 4.5: neighbouring channels turn."""
    c = c.filled(
        vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18, use_bias=False
    )
    c = c.filled(num_attention_heads=16, num_key_value_heads=2, head_dim=128, max_position_embeddings=131072)
    c = c.filled(rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True)
    bias = typed(c, "use_bias", bool)
    return neighbours(llama(c, qkv_bias=bias, o_bias=bias, mlp_bias=bias))


def hunyuan(c: Entries) -> Arch:
    """Tencent HunYuan dense: a norm over heads of q and k behind RoPE."""
    c = c.filled(vocab_size=290943, rms_norm_eps=1e-5)
    for entry, value in {"use_qk_norm": True, "use_cla": False, "use_mla": False}.items():
        expect(c, entry, value)
    for entry in ("kv_lora_rank", "norm_topk_prob"):  # of the attention that use_mla means, and of experts
        c.get(entry)
    names = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
    return llama(c, names=names, qk_norm="after", mlp_bias=False)


def exaone4(c: Entries) -> Arch:
    """LG EXAONE 4: norms behind the blocks; where some layers slide, the others have no positions."""
    c = c.filled(vocab_size=102400, intermediate_size=16384, rms_norm_eps=1e-5, num_key_value_heads=32)
    c = c.filled(sliding_window=4096, sliding_window_pattern=4)
    every = 1 if (own := c["sliding_window_pattern"]) is None else len(own) if isinstance(own, str) else own
    layers = windows(c, lambda i: (i + 1) % every != 0 and i + 1 != len(full(c)))
    arch = llama(c, names=BEHIND, qk_norm="head", layers=layers, **UNBIASED)
    return each(
        arch, lambda i, layer: {"rope": "all" if layer.window or c["sliding_window"] is None else None}
    )


def arcee(c: Entries) -> Arch:
    """Arcee AFM: an mlp without a gate."""
    c = c.filled(hidden_size=2560, intermediate_size=18432, hidden_act="relu2", max_position_embeddings=4096)
    return llama(c.filled(rms_norm_eps=1e-5), gate_up="plain")


def apertus(c: Entries) -> Arch:
    """Swiss AI Apertus: an activation with weights of its own."""
    c = c.filled(
        vocab_size=131072, intermediate_size=14336, hidden_act="xielu", max_position_embeddings=65536
    )
    rope = {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
    }
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    c = c.filled(rms_norm_eps=1e-5, rope_parameters=rope)
    names = Names(attention_in="attention_layernorm", mlp_in="feedforward_layernorm")
    return llama(c, names=names, gate_up="plain", qk_norm="head", mlp_bias=False)


def nemotron(c: Entries) -> Arch:
    """NVIDIA Nemotron 3 and 4, Minitron: LayerNorm whose weights are stored around zero."""
    c = c.filled(vocab_size=256000, hidden_size=6144, intermediate_size=24576, num_attention_heads=48)
    c = c.filled(hidden_act="relu2", max_position_embeddings=4096, norm_eps=1e-5, partial_rotary_factor=0.5)
    return llama(c, norm=Norm(number(c, "norm_eps"), "layer", plus=1.0), gate_up="plain")


def stablelm(c: Entries) -> Arch:
    """StableLM 1 and 2: LayerNorm; a quarter of each head turns; 12B runs attention and mlp side by side."""
    c = c.filled(vocab_size=50304, intermediate_size=6912, hidden_size=2560, max_position_embeddings=4096)
    c = c.filled(num_key_value_heads=32, layer_norm_eps=1e-5, partial_rotary_factor=0.25, use_qkv_bias=False)
    c = c.filled(qk_layernorm=False, use_parallel_residual=False)
    parallel = typed(c, "use_parallel_residual", bool)
    names = Names(
        q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm",
        mlp_in="input_layernorm" if parallel else "post_attention_layernorm",
    )  # fmt: skip
    return llama(
        c, names=names, norm=Norm(number(c, "layer_norm_eps"), "layer"), parallel=parallel, o_bias=False,
        qk_norm="modules" if typed(c, "qk_layernorm", bool) else None,
        qkv_bias=typed(c, "use_qkv_bias", bool), mlp_bias=False,
    )  # fmt: skip


def baichuan(c: Entries) -> Arch:
    """Baichuan 1 7B: q, k and v in one weight."""
    c = c.filled(vocab_size=64000, max_position_embeddings=4096)
    return llama(c, names=Names(qkv="self_attn.W_pack"), qkv="stacked", **UNBIASED)


def baichuan2(c: Entries) -> Arch:
    """Baichuan 2 7B, and 13B of both versions, which has `model_max_length`, is wider, and has ALiBi."""
    if "model_max_length" not in c or positive(c, "hidden_size") == SMALL:
        return replace(baichuan(c), unit_head=True)
    arch = baichuan(c.filled(max_position_embeddings=positive(c, "model_max_length")))
    arch = replace(arch, alibi=slopes(arch.num_heads), unit_head=arch.vocab_size == SECOND_VOCABULARY)
    return each(arch, lambda i, layer: {"rope": None})


def internlm2(c: Entries) -> Arch:
    """InternLM 2 and 2.5: q, k and v are stacked for each KV head."""
    c = c.filled(vocab_size=103168, bias=True)
    names = Names(
        embed="model.tok_embeddings", head="output", qkv="attention.wqkv", o="attention.wo",
        gate="feed_forward.w1",
        up="feed_forward.w3", down="feed_forward.w2", attention_in="attention_norm", mlp_in="ffn_norm",
    )  # fmt: skip
    bias = typed(c, "bias", bool)
    return llama(c, names=names, qkv="grouped", qkv_bias=bias, o_bias=bias, mlp_bias=False)


def internlm3(c: Entries) -> Arch:
    """InternLM 3."""
    c = c.filled(
        vocab_size=128512, max_position_embeddings=32768, rms_norm_eps=1e-5, bias=False, qkv_bias=False
    )
    bias = typed(c, "bias", bool)
    return llama(c, qkv_bias=typed(c, "qkv_bias", bool), o_bias=bias, mlp_bias=bias)
