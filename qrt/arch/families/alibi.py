"""BLOOM, Falcon and MPT, of which most have ALiBi in place of positions (Press et al., arXiv:2108.12409)."""

from __future__ import annotations

import math
from dataclasses import replace

from qrt.arch.base import Arch, Names
from qrt.arch.entries import Entries, expect, number, positive, typed
from qrt.arch.families.gpt import plain
from qrt.errors import CheckpointError, UnsupportedError

NAMES = Names(
    embed="transformer.word_embeddings", layers="transformer.h", norm="transformer.ln_f",
    qkv="self_attention.query_key_value", o="self_attention.dense", up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)  # fmt: skip
MAX_HEADS = 2**12  # each has a slope
CONTEXT = 2048  # tokens that these models were trained on, where config.json does not say


def slopes(heads: int, steepest: float = 8.0) -> tuple[float, ...]:
    """Return each head's slope: those of the power of two below, then every other one of that above."""
    if heads > MAX_HEADS:
        raise CheckpointError(
            f"config.json: number of attention heads: expected at most {MAX_HEADS:,}, got {heads:,}"
        )
    power = 2 ** int(math.log2(heads))
    even = [2.0 ** (-steepest * (i + 1) / power) for i in range(power)]
    odd = [2.0 ** (-steepest * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return *even, *odd


def bloom(c: Entries) -> Arch:
    """BLOOM: a norm behind the embedding."""
    aliases = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
    }
    c = c.filled(aliases, vocab_size=250880, hidden_size=64, num_hidden_layers=2, num_attention_heads=8)
    c = c.filled(max_position_embeddings=CONTEXT, hidden_act="gelu_new", tie_word_embeddings=True)
    expect(c, "apply_residual_connection_post_layernorm", False)
    names = replace(NAMES, embed_norm="transformer.word_embeddings_layernorm")
    return plain(c, names=names, ropes={}, qkv="grouped", alibi=slopes(positive(c, "num_attention_heads")))


def falcon(c: Entries) -> Arch:
    """Falcon RW (ALiBi), 7B (one KV head) and 40B and 180B (KV heads, a norm each for attention and mlp)."""
    c = c.filled(
        {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation"},
        vocab_size=65024,
        hidden_size=4544,
    )
    c = c.filled(num_attention_heads=71, hidden_act="gelu", tie_word_embeddings=True, bias=False, alibi=False)
    c = c.filled(new_decoder_architecture=False, multi_query=True, parallel_attn=True)
    heads, hidden = positive(c, "num_attention_heads"), positive(c, "hidden_size")
    new, bias = typed(c, "new_decoder_architecture", bool), typed(c, "bias", bool)
    kv_heads = positive(c, "num_kv_heads", heads) if new else 1 if typed(c, "multi_query", bool) else heads
    names, parallel = NAMES, typed(c, "parallel_attn", bool) or new
    if new and c.get("num_ln_in_parallel_attn") in (None, 2):
        names = replace(NAMES, attention_in="ln_attn", mlp_in="ln_mlp")
    elif parallel:
        names = replace(NAMES, mlp_in="input_layernorm")
    own = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, "num_kv_heads": kv_heads}
    if typed(c, "alibi", bool):  # q k^T is scaled with it
        own |= {"ropes": {}, "alibi": tuple(slope * (hidden // heads) ** -0.5 for slope in slopes(heads))}
    return plain(c, names=names, qkv="grouped", parallel=parallel, **own)


def mpt(c: Entries) -> Arch:
    """MPT."""
    aliases = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    c = c.filled({"max_position_embeddings": "max_seq_len", **aliases}, vocab_size=50368, hidden_size=2048)
    c = c.filled(num_hidden_layers=24, num_attention_heads=16, expansion_ratio=4, tie_word_embeddings=True)
    c = c.filled(hidden_act="gelu", attn_config={})
    attention = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, **typed(c, "attn_config", dict)}
    if not attention["alibi"] or attention.get("qk_ln") or attention.get("softmax_scale"):
        raise UnsupportedError(
            "config.json: expected attn_config with alibi, without qk_ln and softmax_scale"
        )
    expect(c, "logit_scale", None)
    names = Names(
        embed="transformer.wte", layers="transformer.blocks", norm="transformer.norm_f", qkv="attn.Wqkv",
        o="attn.out_proj", up="ffn.up_proj", down="ffn.down_proj", attention_in="norm_1", mlp_in="norm_2",
    )  # fmt: skip
    heads, hidden = positive(c, "num_attention_heads"), positive(c, "hidden_size")
    clip = None if attention["clip_qkv"] is None else number(attention, "clip_qkv")
    return plain(
        c, names=names, ropes={}, qkv="stacked", qkv_bias=False, o_bias=False, mlp_bias=False, clip=clip,
        intermediate_size=int(number(c, "expansion_ratio") * hidden),
        alibi=slopes(heads, number(attention, "alibi_bias_max")),
    )  # fmt: skip
