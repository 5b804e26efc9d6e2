"""Mixtures that are no variant of Mixtral or Qwen.

GLM 4.5, dots.llm1, MiniMax M2 and Ernie 4.5 correct the choice of experts by a stored tensor (DeepSeek V3,
arXiv:2412.19437).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qrt.arch.base import Arch, Names
from qrt.arch.entries import MAX_LAYERS, MAX_SIZE, Entries, expect, number, positive, typed
from qrt.arch.experts import Experts, RouterConfig, Stacked
from qrt.arch.families.llama import each, full, llama, sparse, windows
from qrt.arch.families.mistral import MIXTRAL, UNBIASED
from qrt.arch.families.others import ernie, granite, hunyuan
from qrt.errors import UnsupportedError

SIGMOIDS = ("sigmoid", "noaux_tc")  # both names are in use
LEAST_SUM = 1e-6  # of chosen scores; where Ernie divides by no less than this, qrt divides by the sum
GRANITE: dict[str, Any] = {
    "module": "block_sparse_moe.experts",
    "stacked": Stacked("input_linear.weight", "output_linear.weight", module="block_sparse_moe"),
    "gate": "block_sparse_moe.router.layer",
}
SHARED = ("input_linear", "output_linear")  # of Granite's mlp beside its experts: gate over up, and down


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
    router = RouterConfig(
        positive(c, "num_experts_per_tok"), "sigmoid", typed(c, "norm_topk_prob", bool),
        number(c, "routed_scaling_factor", 1.0), positive(c, "n_group", 1), positive(c, "topk_group", 1), 2,
    )  # fmt: skip
    width = positive(c, "moe_intermediate_size")
    experts = Experts(
        positive(c, "n_routed_experts", most=MAX_LAYERS), width, router,
        correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts",
        shared_width=width * positive(c, "n_shared_experts"),
    )  # fmt: skip
    dense = typed(c, "first_k_dense_replace", int)
    return sparse(arch, experts, lambda i: i >= dense, ignored=_further(c, arch, "num_nextn_predict_layers"))


def _further(c: Entries, arch: Arch, key: str) -> tuple[str, ...]:
    """Return the layers behind all others that predict tokens further on, which qrt does not run."""
    count = typed(c, key, int, None) or 0
    return tuple(f"{arch.names.layers}.{arch.num_layers + i}." for i in range(min(count, MAX_LAYERS)))


def minimax_m2(c: Entries) -> Arch:
    """MiniMax M2: Mixtral's names; a norm over all heads of q and k; `rotary_dim` channels of a head turn."""
    c = c.filled({"num_local_experts": "num_experts"}, num_local_experts=256, num_experts_per_tok=8)
    c = c.filled(vocab_size=200064, hidden_size=3072, intermediate_size=1536, num_hidden_layers=62)
    c = c.filled(num_attention_heads=48, num_key_value_heads=8, head_dim=128, rope_theta=5e6)
    c = c.filled(max_position_embeddings=196608)
    for entry, value in {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True}.items():
        expect(c, entry, value)
    expect(c, "scoring_func", "sigmoid")
    expect(c, "norm_topk_prob", True)
    arch = llama(c, qk_norm="whole", **UNBIASED)
    if c.get("rotary_dim") is not None:
        rotary_dim = positive(c, "rotary_dim", most=arch.head_dim)
        if rotary_dim % 2:
            raise UnsupportedError(f"config.json: rotary_dim: expected an even number, got {rotary_dim}")
        arch = replace(arch, ropes={"all": replace(arch.ropes["all"], rotary_dim=rotary_dim)})
    experts = Experts(
        positive(c, "num_local_experts", most=MAX_LAYERS), arch.intermediate_size,
        RouterConfig(positive(c, "num_experts_per_tok"), "sigmoid", renormalize=True),
        correction="block_sparse_moe.e_score_correction_bias", **MIXTRAL,
    )  # fmt: skip
    return sparse(arch, experts, ignored=_further(c, arch, "num_mtp_modules"))


def ernie_moe(c: Entries) -> Arch:
    """Baidu Ernie 4.5 MoE: mixtures in every so many of some layers."""
    c = c.filled(hidden_size=2560, intermediate_size=12288, num_hidden_layers=28, num_attention_heads=20)
    c = c.filled(num_key_value_heads=4, head_dim=None, moe_intermediate_size=1536, moe_num_shared_experts=2)
    c = c.filled({"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}, num_experts=64)
    c = c.filled(num_experts_per_tok=6, moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1)
    expect(c, "use_bias", False)
    expect(c, "moe_use_aux_free", True)
    expect(c, "moe_gate_act", "softmax", None)
    if (least := number(c, "moe_norm_min", 1e-12)) > LEAST_SUM:
        raise UnsupportedError(f"config.json: moe_norm_min: expected at most {LEAST_SUM}, got {least}")
    width = positive(c, "moe_intermediate_size")
    shared = typed(c, "moe_num_shared_experts", int) and positive(c, "moe_num_shared_experts")
    experts = Experts(
        positive(c, "num_experts", most=MAX_LAYERS), width,
        RouterConfig(positive(c, "num_experts_per_tok"), renormalize=True),
        correction="mlp.moe_statics.e_score_correction_bias", correction_rank=2,
        shared="mlp.shared_experts" if shared else None, shared_width=width * shared,
    )  # fmt: skip
    arch, every = ernie(c), positive(c, "moe_layer_interval")
    first, last = typed(c, "moe_layer_start_index", int), typed(c, "moe_layer_end_index", int, None)
    within = range(first, arch.num_layers if last in (-1, None) else last + 1)
    return sparse(arch, experts, lambda i: i in within and (i + 1) % every == 0, ignored=("model.mtp_",))


def hunyuan_moe(c: Entries) -> Arch:
    """Tencent HunYuan A13B: an mlp beside experts of its width. Entries may be lists, one for each layer."""
    c = c.filled({"num_experts_per_tok": "moe_topk"}, num_experts=1, num_experts_per_tok=1)
    c = c.filled(num_shared_expert=1, moe_layer_num_skipped=0)
    expect(c, "use_mixed_mlp_moe", True)
    expect(c, "norm_topk_prob", True)
    expect(c, "group_limited_greedy", False)
    arch = hunyuan(c)
    width = arch.intermediate_size
    experts = Experts(
        _alike(c, "num_experts"), _alike(c.filled(moe_intermediate_size=width), "moe_intermediate_size"),
        RouterConfig(_alike(c, "num_experts_per_tok"), renormalize=True), gate="mlp.gate.wg",
        shared="mlp.shared_mlp", shared_width=width * _alike(c, "num_shared_expert"),
    )  # fmt: skip
    skipped = typed(c, "moe_layer_num_skipped", int)
    return sparse(arch, experts, lambda i: i >= skipped)


def _alike(c: Entries, key: str) -> int:
    """Return a positive number that may be a list of one for each layer, all equal."""
    value = c[key]
    if isinstance(value, list) and len(set(map(repr, value))) != 1:
        raise UnsupportedError(
            f"config.json: {c.name(key)}: expected the same in all layers, got {value!r:.60}"
        )
    found = value[0] if isinstance(value, list) else value
    return positive({c.name(key): found}, c.name(key), most=MAX_LAYERS if "size" not in key else MAX_SIZE)


def granite_moe(c: Entries, **experts: Any) -> Arch:
    """IBM Granite 3 MoE."""
    c = c.filled(num_local_experts=8, num_experts_per_tok=2)
    arch = granite(c)
    router = RouterConfig(positive(c, "num_experts_per_tok"), "top")
    count = positive(c, "num_local_experts", most=MAX_LAYERS)
    return sparse(arch, Experts(count, arch.intermediate_size, router, **GRANITE, **experts))


def granite_shared(c: Entries) -> Arch:
    """Granite MoE with an mlp beside its experts."""
    c = c.filled(shared_intermediate_size=0)
    width = typed(c, "shared_intermediate_size", int) and positive(c, "shared_intermediate_size")
    return granite_moe(c, shared="shared_mlp" if width else None, shared_width=width, shared_stacked=SHARED)


def granite_hybrid(c: Entries) -> Arch:
    """Granite 4 without Mamba layers: dense, or a mixture; positions may be absent."""
    c = c.filled({"layer_types": "layers_block_type"}, shared_intermediate_size=1024, num_local_experts=8)
    kinds, width = c.get("layer_types"), positive(c, "shared_intermediate_size")
    if not isinstance(kinds, list) or not {"attention", "full_attention"}.issuperset(map(str, kinds)):
        raise UnsupportedError(
            "config.json: layer_types: expected 'attention' alone, as qrt runs no Mamba layers, "
            f"got {kinds!r:.60}"
        )
    expect(c, "position_embedding_type", None, "rope")
    if c["num_local_experts"] == 0:
        inside, down = (f"shared_mlp.{name}" for name in SHARED)
        arch = granite(c, names=Names(gate_up=inside, down=down), gate_up="stacked", intermediate_size=width)
    else:
        arch = granite_shared(c)
    turned = "all" if c.get("position_embedding_type") == "rope" else None
    return each(arch, lambda i, layer: {"rope": turned})
