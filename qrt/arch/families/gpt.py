"""GPT-2 and its time: LayerNorm, an mlp without gate, learned positions or RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import Entries, expect, number, positive, typed
from qrt.arch.families.llama import each, llama, windows

NAMES = Names(
    embed="transformer.wte", positions="transformer.wpe", layers="transformer.h", norm="transformer.ln_f",
    qkv="attn.c_attn", o="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj", attention_in="ln_1", mlp_in="ln_2",
)  # fmt: skip
ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer", "intermediate_size": "n_inner", "hidden_act": "activation_function",
}  # fmt: skip
BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def plain(c: Entries, **changes: Any) -> Arch:
    """Return an architecture with LayerNorm and an mlp without gate, by default 4 times as wide as hidden."""
    if "norm" not in changes:
        changes["norm"] = Norm(number(c, "layer_norm_epsilon", 1e-5), "layer")
    if c.get("intermediate_size") is None:
        changes["intermediate_size"] = 4 * positive(c, "hidden_size")
    arch = llama(c, **{"gate_up": "plain", **BIASED} | changes)
    return arch if arch.ropes else each(arch, lambda i, layer: {"rope": None})


def gpt2(c: Entries) -> Arch:
    """GPT-2."""
    c = c.filled(
        ALIASES, vocab_size=50257, hidden_size=768, max_position_embeddings=1024, num_attention_heads=12
    )
    c = c.filled(num_hidden_layers=12, hidden_act="gelu_new", tie_word_embeddings=True)
    for entry, value in {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}.items():
        expect(c, entry, value)
    return plain(c, names=NAMES, ropes={}, positions=0, qkv="stacked", transposed=True)


def bigcode(c: Entries) -> Arch:
    """StarCoder 1 and SantaCoder: GPT-2 with one KV head, and weights that are not transposed."""
    c = c.filled(
        ALIASES, vocab_size=50257, hidden_size=768, max_position_embeddings=1024, num_attention_heads=12
    )
    c = c.filled(
        num_hidden_layers=12, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, multi_query=True
    )
    expect(c, "scale_attn_weights", True)
    heads = 1 if typed(c, "multi_query", bool) else positive(c, "num_attention_heads")
    return plain(c, names=NAMES, ropes={}, positions=0, qkv="stacked", num_kv_heads=heads)


def gptj(c: Entries) -> Arch:
    """GPT-J: neighbouring channels turn, of the first `rotary_dim`; attention and mlp side by side."""
    c = c.filled(
        ALIASES, vocab_size=50400, hidden_size=4096, max_position_embeddings=2048, num_attention_heads=16
    )
    c = c.filled(num_hidden_layers=28, hidden_act="gelu_new", rotary_dim=64)
    names = replace(
        NAMES, positions=None, q="attn.q_proj", k="attn.k_proj", v="attn.v_proj", o="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out", mlp_in="ln_1",
    )  # fmt: skip
    arch = plain(c, names=names, parallel=True, qkv_bias=False, o_bias=False, head_bias=True)
    turned = replace(arch.ropes["all"], rotary_dim=positive(c, "rotary_dim"), pairs="neighbours")
    return replace(arch, ropes={"all": turned})


def neox(c: Entries) -> Arch:
    """GPT-NeoX, Pythia: q, k and v stacked for each head; a quarter of each head turns."""
    c = c.filled(
        {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}, partial_rotary_factor=0.25
    )
    c = c.filled(vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64)
    c = c.filled(intermediate_size=24576, hidden_act="gelu", layer_norm_eps=1e-5, use_parallel_residual=True)
    c = c.filled(attention_bias=True)
    names = Names(
        embed="gpt_neox.embed_in", layers="gpt_neox.layers", norm="gpt_neox.final_layer_norm",
        head="embed_out",
        qkv="attention.query_key_value", o="attention.dense", up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )  # fmt: skip
    bias = typed(c, "attention_bias", bool)
    return plain(
        c, names=names, qkv="grouped", norm=Norm(number(c, "layer_norm_eps"), "layer"), qkv_bias=bias,
        o_bias=bias,
        parallel=typed(c, "use_parallel_residual", bool),
    )  # fmt: skip


def opt(c: Entries) -> Arch:
    """OPT: a request's first token has the learned position 2."""
    c = c.filled({"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}, vocab_size=50272)
    c = c.filled(hidden_size=768, num_hidden_layers=12, intermediate_size=3072, num_attention_heads=12)
    c = c.filled(hidden_act="relu", tie_word_embeddings=True, enable_bias=True)
    for entry, value in {"do_layer_norm_before": True, "layer_norm_elementwise_affine": True}.items():
        expect(c, entry, value)
    expect(c, "word_embed_proj_dim", positive(c, "hidden_size"))
    body, bias = "model.decoder", typed(c, "enable_bias", bool)
    names = Names(
        embed=f"{body}.embed_tokens", positions=f"{body}.embed_positions", layers=f"{body}.layers",
        norm=f"{body}.final_layer_norm", o="self_attn.out_proj", up="fc1", down="fc2",
        attention_in="self_attn_layer_norm", mlp_in="final_layer_norm",
    )  # fmt: skip
    return plain(c, names=names, ropes={}, positions=2, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def starcoder2(c: Entries) -> Arch:
    """StarCoder 2: Mistral's attention, GPT-2's norms and mlp."""
    c = c.filled(vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30)
    c = c.filled(
        num_attention_heads=24, num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5
    )
    c = c.filled(max_position_embeddings=4096, sliding_window=None, use_bias=True, tie_word_embeddings=True)
    bias = typed(c, "use_bias", bool)
    return plain(
        c, names=Names(up="mlp.c_fc", down="mlp.c_proj"), norm=Norm(number(c, "norm_epsilon"), "layer"),
        layers=windows(c, lambda i: True, listed=False), qkv_bias=bias, o_bias=bias, mlp_bias=bias,
    )  # fmt: skip
