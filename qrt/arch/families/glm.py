"""GLM 4 and ChatGLM 2 and 3: half of each head turns, in neighbouring pairs; gate and up are one weight."""

from __future__ import annotations

from typing import Any

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import Entries, expect, number, typed
from qrt.arch.families.llama import llama, neighbours

DEFAULTS = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def glm(c: Entries, **changes: Any) -> Arch:
    """GLM 4 9B."""
    known = {"gate_up": "stacked", "o_bias": False, "mlp_bias": False}
    return neighbours(llama(c.filled(**DEFAULTS), **known | changes))


def glm4(c: Entries) -> Arch:
    """GLM 4 0414: norms behind the blocks, too."""
    return glm(c, names=Names(attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"))


def chatglm(c: Entries) -> Arch:
    """ChatGLM 2 and 3, GLM 4 9B as first published."""
    c = c.filled(
        {
            "vocab_size": "padded_vocab_size", "intermediate_size": "ffn_hidden_size",
            "head_dim": "kv_channels", "num_hidden_layers": "num_layers",
            "max_position_embeddings": "seq_length", "attention_bias": "add_qkv_bias",
            "rms_norm_eps": "layernorm_epsilon", "num_key_value_heads": "multi_query_group_num",
        },
        rope_theta=1e4 * number(c, "rope_ratio", 1.0), vocab_size=65024, num_hidden_layers=28,
        max_position_embeddings=2048, multi_query_attention=False, rms_norm_eps=1e-5, attention_bias=False,
        num_key_value_heads=1,
    )  # fmt: skip
    for entry, value in {"rmsnorm": True, "post_layer_norm": True, "add_bias_linear": False}.items():
        expect(c, entry, value)
    expect(c, "apply_residual_connection_post_layernorm", False)
    body = "transformer.encoder"
    names = Names(
        embed="transformer.embedding.word_embeddings", layers=f"{body}.layers",
        norm=f"{body}.final_layernorm", head="transformer.output_layer",
        qkv="self_attention.query_key_value", o="self_attention.dense",
        gate_up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h",
    )  # fmt: skip
    one_each = (
        {}
        if typed(c, "multi_query_attention", bool)
        else {"num_kv_heads": c.filled(num_attention_heads=32)["num_attention_heads"]}
    )
    return glm(c, names=names, qkv="stacked", norm=Norm(number(c, "rms_norm_eps")), **one_each)
