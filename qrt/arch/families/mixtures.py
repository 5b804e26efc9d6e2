"""Mixtures whose choice of experts is corrected by a stored tensor (DeepSeek V3, arXiv:2412.19437)."""

from __future__ import annotations

from dataclasses import replace

from qrt.arch.base import Arch
from qrt.arch.entries import MAX_LAYERS, Entries, expect, number, positive, typed
from qrt.arch.experts import Experts, Router
from qrt.arch.families.llama import full, llama, sparse, windows
from qrt.arch.families.mistral import MIXTRAL, UNBIASED
from qrt.errors import UnsupportedError

SIGMOIDS = ("sigmoid", "noaux_tc")  # both names are in use


def glm4_moe(c: Entries) -> Arch:
    """GLM 4.5 to 4.7: half of each head turns."""
    c = c.filled(vocab_size=151552, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96)
    c = c.filled(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, use_qk_norm=False)
    c = c.filled(n_routed_experts=128, num_experts_per_tok=8, norm_topk_prob=True, n_shared_experts=1)
    c = c.filled(moe_intermediate_size=1408, first_k_dense_replace=1, partial_rotary_factor=0.5)
    c = c.filled({"num_nextn_predict_layers": "num_mtp_layers"}, num_nextn_predict_layers=1)
    qk_norm = "head" if typed(c, "use_qk_norm", bool) else None
    return _corrected(c, llama(c, qk_norm=qk_norm, o_bias=False, mlp_bias=False))


def dots1(c: Entries) -> Arch:
    """Rednote dots.llm1: Qwen 3's attention."""
    c = c.filled(vocab_size=152064, hidden_size=4608, intermediate_size=10944, num_hidden_layers=62)
    c = c.filled(num_key_value_heads=32, moe_intermediate_size=1408, first_k_dense_replace=0)
    c = c.filled(norm_topk_prob=False, sliding_window=4096, max_window_layers=62)
    first = typed(c, "max_window_layers", int)
    layers = full(c) if c["sliding_window"] is None else windows(c, lambda i: i >= first)
    return _corrected(c, llama(c, layers=layers, qk_norm="head", mlp_bias=False))


def _corrected(c: Entries, arch: Arch) -> Arch:
    """Return `arch` with DeepSeek V3's mixture: groups of experts, shared ones, and dense first layers."""
    expect(c, "moe_layer_freq", 1)
    expect(c, "scoring_func", *SIGMOIDS)
    expect(c, "topk_method", "noaux_tc")
    router = Router(
        positive(c, "num_experts_per_tok"), "sigmoid", typed(c, "norm_topk_prob", bool),
        number(c, "routed_scaling_factor", 1.0), positive(c, "n_group", 1), positive(c, "topk_group", 1), 2,
    )  # fmt: skip
    width = positive(c, "moe_intermediate_size")
    experts = Experts(
        positive(c, "n_routed_experts", most=MAX_LAYERS), width, router,
        correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts",
        shared_width=width * positive(c, "n_shared_experts"),
    )  # fmt: skip
    dense, predicting = (
        typed(c, "first_k_dense_replace", int),
        typed(c, "num_nextn_predict_layers", int, None),
    )
    # layers that predict tokens further on, which qrt does not run
    ignored = tuple(f"{arch.names.layers}.{arch.num_layers + i}." for i in range(predicting or 0))
    return sparse(arch, experts, lambda i: i >= dense, ignored=ignored)


def minimax_m2(c: Entries) -> Arch:
    """MiniMax M2: Mixtral's names; a norm over all heads of q and k; `rotary_dim` channels of a head turn."""
    c = c.filled({"num_local_experts": "num_experts"}, num_local_experts=256, num_experts_per_tok=8)
    c = c.filled(vocab_size=200064, hidden_size=3072, intermediate_size=1536, num_hidden_layers=62)
    c = c.filled(num_attention_heads=48, num_key_value_heads=8, head_dim=128, rope_theta=5e6)
    c = c.filled(max_position_embeddings=196608)
    for entry, value in {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True}.items():
        expect(c, entry, value)
    expect(c, "scoring_func", "sigmoid")
    arch = llama(c, qk_norm="whole", **UNBIASED)
    if c.get("rotary_dim") is not None:
        turning = positive(c, "rotary_dim", most=arch.head_dim)
        if turning % 2:
            raise UnsupportedError(f"config.json: rotary_dim: expected an even number, got {turning}")
        arch = replace(arch, ropes={"all": replace(arch.ropes["all"], turning=turning)})
    experts = Experts(
        positive(c, "num_local_experts", most=MAX_LAYERS), arch.intermediate_size,
        Router(positive(c, "num_experts_per_tok"), "sigmoid", renormalize=True),
        correction="block_sparse_moe.e_score_correction_bias", **MIXTRAL,
    )  # fmt: skip
    return sparse(arch, experts)
