"""Microsoft's Phi: 1 to 2 with a parallel residual and LayerNorm, 3 to 4 as Llama with fused projections."""

from __future__ import annotations

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import MAX_LAYERS, Entries, expect, number, positive, typed
from qrt.arch.experts import Experts, RouterConfig
from qrt.arch.families.llama import llama, sparse, windows
from qrt.arch.families.mistral import MIXTRAL


def phi(c: Entries) -> Arch:
    """Phi 1, 1.5 and 2."""
    c = c.filled(vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24)
    c = c.filled(hidden_act="gelu_new", layer_norm_eps=1e-5, partial_rotary_factor=0.5)
    expect(c, "qk_layernorm", False)
    names = Names(
        norm="model.final_layernorm", o="self_attn.dense", mlp_in="input_layernorm", up="mlp.fc1",
        down="mlp.fc2",
    )  # fmt: skip
    return llama(
        c, names=names, norm=Norm(number(c, "layer_norm_eps"), "layer"), parallel=True, gate_up="plain",
        qkv_bias=True, o_bias=True, mlp_bias=True, head_bias=True,
    )  # fmt: skip


def phi3(c: Entries) -> Arch:
    """Phi 3, 3.5 and 4."""
    c = c.filled(vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096)
    c = c.filled(original_max_position_embeddings=4096, rms_norm_eps=1e-5, sliding_window=None)
    layers = windows(c, lambda i: True, listed=False)
    return llama(
        c, layers=layers, qkv="stacked", gate_up="stacked", qkv_bias=False, o_bias=False, mlp_bias=False
    )


def phimoe(c: Entries) -> Arch:
    """Phi 3.5 MoE: Mixtral's experts, two of a token, chosen one after the other; LayerNorm."""
    c = c.filled(vocab_size=32064, intermediate_size=6400, num_key_value_heads=8, rms_norm_eps=1e-5)
    c = c.filled(max_position_embeddings=131072, rope_theta=1e6, sliding_window=None, lm_head_bias=False)
    c = c.filled(num_local_experts=16, router_jitter_noise=0.01)
    expect(c, "num_experts_per_tok", 2)
    arch = llama(
        c, layers=windows(c, lambda i: True, listed=False), norm=Norm(number(c, "rms_norm_eps"), "layer"),
        mlp_bias=False, head_bias=typed(c, "lm_head_bias", bool),
    )  # fmt: skip
    router = RouterConfig(2, "sparsemixer", jitter=number(c, "router_jitter_noise"))
    count = positive(c, "num_local_experts", most=MAX_LAYERS)
    return sparse(arch, Experts(count, arch.intermediate_size, router, **MIXTRAL))
