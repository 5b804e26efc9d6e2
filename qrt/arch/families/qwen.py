"""Qwen 1 to 3 and their mixtures: Llama's shape with biases on q, k and v, or with norms over their heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import MAX_LAYERS, Entries, expect, number, positive, typed
from qrt.arch.experts import Experts, RouterConfig
from qrt.arch.families.llama import full, llama, sparse, windows
from qrt.arch.layer import Layer

DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
MIXTURE = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}


def qwen(c: Entries) -> Arch:
    """Qwen 1: other names; its `intermediate_size` counts gate and up."""
    c = c.filled({"head_dim": "kv_channels", "max_position_embeddings": "seq_length"}, head_dim=128)
    c = c.filled({"rope_theta": "rotary_emb_base"}, vocab_size=151936, intermediate_size=22016)
    c = c.filled(max_position_embeddings=8192, layer_norm_epsilon=1e-6)
    expect(c, "no_bias", True)
    names = Names(
        embed="transformer.wte", layers="transformer.h", norm="transformer.ln_f", qkv="attn.c_attn",
        o="attn.c_proj",
        gate="mlp.w2", up="mlp.w1", down="mlp.c_proj", attention_in="ln_1", mlp_in="ln_2",
    )  # fmt: skip
    return llama(
        c, names=names, qkv="stacked", qkv_bias=True, intermediate_size=positive(c, "intermediate_size") // 2,
        norm=Norm(number(c, "layer_norm_epsilon")),
    )  # fmt: skip


def qwen2(c: Entries, **changes: Any) -> Arch:
    """Qwen 2 and 2.5."""
    c = c.filled(**DEFAULTS)
    if "layers" not in changes:
        changes["layers"] = upper(c)
    return llama(c, **{"qkv_bias": True, "o_bias": False, "mlp_bias": False} | changes)


def qwen3(c: Entries, **changes: Any) -> Arch:
    """Qwen 3: a norm over each head of q and k."""
    c = c.filled(head_dim=128, **DEFAULTS)
    if "layers" not in changes:
        changes["layers"] = upper(c)
    return llama(c, **{"mlp_bias": False, "qk_norm": "head"} | changes)


def qwen2_moe(c: Entries) -> Arch:
    """Qwen 1.5 and 2 MoE: a mixture beside an expert that all tokens go through."""
    c = c.filled(num_attention_heads=16, num_key_value_heads=16, num_experts=60, qkv_bias=True)
    c = c.filled(moe_intermediate_size=1408, num_experts_per_tok=4, intermediate_size=5632, **MIXTURE)
    c = c.filled(shared_expert_intermediate_size=5632, **DEFAULTS)
    # of the layers below `max_window_layers` every other one slides
    layers = upper(c, lambda i, first: i % 2 == 0 and i < first)
    return _mixture(
        c, qwen2(c, layers=layers, qkv_bias=typed(c, "qkv_bias", bool)), shared="mlp.shared_expert",
        shared_width=positive(c, "shared_expert_intermediate_size"), shared_gate="mlp.shared_expert_gate",
    )  # fmt: skip


def qwen3_moe(c: Entries) -> Arch:
    """Qwen 3 MoE."""
    c = c.filled({"num_experts": "num_local_experts"}, num_experts=128, num_key_value_heads=4, head_dim=None)
    c = c.filled(moe_intermediate_size=768, num_experts_per_tok=8, intermediate_size=6144, **MIXTURE)
    c = c.filled(**DEFAULTS)
    layers = windows(c, lambda i: True, listed=False) if typed(c, "use_sliding_window", bool) else full(c)
    return _mixture(c, qwen3(c, layers=layers))


def upper(c: Entries, slides: Callable[[int, int], bool] = lambda i, first: i >= first) -> tuple[Layer, ...]:
    """Return layers that slide as listed, or by their index and `max_window_layers`: from there on."""
    if not typed(c, "use_sliding_window", bool):
        return full(c)
    first = typed(c, "max_window_layers", int)
    return windows(c, lambda i: slides(i, first))


def _mixture(c: Entries, arch: Arch, **experts: Any) -> Arch:
    """Return `arch` with experts in its sparse layers.

    They are all but `mlp_only_layers`, and of the others every `decoder_sparse_step`-th.
    """
    step, dense = positive(c, "decoder_sparse_step"), c.get("mlp_only_layers") or []
    count, width = positive(c, "num_experts", most=MAX_LAYERS), positive(c, "moe_intermediate_size")
    top_k, renormalize = positive(c, "num_experts_per_tok"), typed(c, "norm_topk_prob", bool)
    own = Experts(count, width, RouterConfig(top_k, renormalize=renormalize), **experts)
    return sparse(arch, own, lambda i: (i + 1) % step == 0 and i not in dense)
