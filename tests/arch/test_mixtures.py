"""What is read from a mixture's config.json: its experts, who chooses them, and their place in a layer."""

import pytest
import torch
import transformers

from qrt.arch import Arch
from qrt.arch.base import Smooth
from qrt.arch.read import read_arch
from qrt.errors import CheckpointError, UnsupportedError
from qrt_eval.reports.models import NEEDED

SIZES = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip
MIXTURE = {**SIZES, "moe_intermediate_size": 96, "num_experts_per_tok": 2}
DEEPSEEK = {"n_shared_experts": 2, "first_k_dense_replace": 1}
MIXTURES = {  # how many experts there are; what else it needs
    "Mixtral": ("num_local_experts", {}),
    "Qwen2Moe": ("num_experts", {}),
    "Qwen3Moe": ("num_experts", {}),
    "Olmoe": ("num_experts", {}),
    "Phimoe": ("num_local_experts", {}),
    "Glm4Moe": ("n_routed_experts", DEEPSEEK),
    "Dots1": ("n_routed_experts", DEEPSEEK),
    "MiniMaxM2": ("num_local_experts", {}),
    "GraniteMoe": ("num_local_experts", {}),
    "GraniteMoeShared": ("num_local_experts", {"shared_intermediate_size": 64}),
    "GraniteMoeHybrid": ("num_local_experts", {"layer_types": ["attention"] * 3}),
    "Ernie4_5_Moe": ("moe_num_experts", {"moe_k": 2}),
    "HunYuanMoEV1": ("num_experts", {"moe_topk": [2, 2, 2]}),
}
# an mlp that all tokens go through
SHARED = {"Qwen2Moe": "mlp.shared_expert", "HunYuanMoEV1": "mlp.shared_mlp"}
SHARED |= dict.fromkeys(("Glm4Moe", "Dots1", "Ernie4_5_Moe"), "mlp.shared_experts")
STACKED = ("GraniteMoeShared", "GraniteMoeHybrid")  # whose such mlp has gate and up in one
PLAIN_WIDTH = ("Mixtral", "Olmoe", "Phimoe", "MiniMaxM2", "GraniteMoe", *STACKED)  # have intermediate_size


def read(family: str, config: dict) -> Arch:
    return read_arch({**config, "architectures": [f"{family}ForCausalLM"]}, "model")


def of_class(family: str, config: dict) -> transformers.PretrainedConfig:
    """transformers' config of the family."""
    return getattr(transformers, f"{family}Config")(**config)


def mixture(ours: Arch) -> tuple[int, int, int]:
    """Return how many experts there are, how wide they are, and how many a token has."""
    return ours.experts.count, ours.experts.width, ours.experts.router.top_k


def first(config: transformers.PretrainedConfig, *names: str, default: object = None) -> object:
    """Return the first of the entries that the class has."""
    return next((own for name in names if (own := getattr(config, name, None)) is not None), default)


@pytest.mark.parametrize("family", MIXTURES)
def test_entries_that_are_left_out_are_those_of_the_class(family):
    needed = NEEDED.get(f"{family}ForCausalLM", {})
    truth, ours = of_class(family, needed), read(family, needed)
    experts, router = ours.experts, ours.experts.router
    assert experts.count == first(truth, "num_local_experts", "num_experts")
    assert experts.width == first(truth, "moe_intermediate_size", default=truth.intermediate_size)
    shared = {"HunYuanMoEV1": truth.intermediate_size, "Ernie4_5_Moe": 2 * 1536}.get(family)
    assert experts.shared_width == first(
        truth, "shared_intermediate_size", "shared_expert_intermediate_size",
        default=shared or experts.width * first(truth, "n_shared_experts", default=0),
    )  # fmt: skip
    assert router.top_k == truth.num_experts_per_tok
    assert router.renormalize == first(truth, "norm_topk_prob", default=router.renormalize)
    assert router.factor == first(truth, "routed_scaling_factor", default=1)
    assert (router.groups, router.kept) == (
        first(truth, "n_group", default=1),
        first(truth, "topk_group", default=1),
    )
    dense = first(truth, "first_k_dense_replace", "moe_layer_start_index", default=0)
    assert [layer.sparse for layer in ours.layers] == [i >= dense for i in range(ours.num_layers)]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_names_its_experts(family):
    """All experts' projections of a kind are fused; the norm before them is read by the routers too."""
    count, more = MIXTURES[family]
    arch = read(family, {**MIXTURE, count: 3, **more})
    assert len(set(arch.projections)) == 4 + 3 * (3 + (family in SHARED)) + 2 * (family in STACKED)
    assert sum(map(arch.is_expert, arch.projections)) == 3 * 3
    assert arch.experts.width == (SIZES["intermediate_size"] if family in PLAIN_WIDTH else 96)
    assert arch.intermediate_size == SIZES["intermediate_size"]
    found = {pair.source: pair.readers for pair in arch.smooth}
    readers = 2 * (3 + (family in SHARED)) + (family in STACKED)
    assert len(found["post_attention_layernorm"]) == readers and arch.routers
    each = [f"{arch.experts.module}.{e}" for e in range(3)]
    each += [SHARED[family]] if family in SHARED else []
    _, up, down = arch.experts.parts
    assert all(found[f"{expert}.{up}"] == (f"{expert}.{down}",) for expert in each)
    if family in STACKED:
        parts = [pair for pair in arch.smooth if pair.part == "up"]
        assert parts == [Smooth("shared_mlp.input_linear", ("shared_mlp.output_linear",), part="up")]


@pytest.mark.parametrize("family", ["Glm4Moe", "Dots1"])
def test_the_first_layers_of_a_mixture_are_dense(family):
    arch = read(family, {**MIXTURE, "n_routed_experts": 4, **DEEPSEEK, "first_k_dense_replace": 2})
    assert [layer.sparse for layer in arch.layers] == [False, False, True]
    dense, sparse = arch.at(1), arch.at(2)
    assert [parts for _, parts in dense.fuse[2:]] == [("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]
    assert dense.routers == () and sparse.routers == ("mlp.gate",)
    assert {pair.source: pair.readers for pair in dense.smooth}["mlp.up_proj"] == ("mlp.down_proj",)
    inside = {f"self_attn.{part}_proj" for part in "qkv"}
    assert set(dense.readers) == inside | {"mlp.gate_proj", "mlp.up_proj"}
    own = {name for expert in sparse.experts.all for name in expert[:2]} | set(
        sparse.experts.shared_parts[:2]
    )
    assert set(sparse.readers) == inside | own
    assert {sparse.readers[name] for name in own} == {"post_attention_layernorm"}
    assert sparse.experts.shared_width == 2 * 96


CORRECTED, EIGHT = "Glm4Moe", {"n_routed_experts": 8, "num_experts_per_tok": 2, "head_dim": 128}
BAD = {
    "more of a token than there are": (
        "Olmoe", {"num_experts": 4, "num_experts_per_tok": 5}, "at most 4 experts of a token.* got 5",
    ),
    "groups of unequal size": (CORRECTED, EIGHT | {"n_group": 3}, "8 experts in groups of .* got 3 groups"),
    "groups that hold too few": (CORRECTED, EIGHT | {"n_group": 8}, "of which 1 hold the 2 of a token"),
    "more channels than a head has": ("MiniMaxM2", {"rotary_dim": 256}, "rotary_dim: expected at most 128"),
    "no experts": (CORRECTED, EIGHT | {"n_routed_experts": 0}, "n_routed_experts: expected a positive"),
    "no shared ones": (CORRECTED, EIGHT | {"n_shared_experts": None}, "n_shared_experts: expected a pos"),
}  # fmt: skip
OTHERS = {
    "another score": (
        CORRECTED, EIGHT | {"scoring_func": "softmax"}, "scoring_func: .* 'sigmoid' or 'noaux_tc', got 'soft",
    ),
    "another choice": (CORRECTED, EIGHT | {"topk_method": "greedy"}, "topk_method: .* 'noaux_tc', got 'gr"),
    "every second layer": (CORRECTED, EIGHT | {"moe_layer_freq": 2}, "moe_layer_freq: expected 1, got 2"),
    "three of a token": ("Phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok: expected 2, got 3"),
    "no correction": ("MiniMaxM2", {"use_routing_bias": False}, "use_routing_bias: expected True, got False"),
    "an odd number of channels": ("MiniMaxM2", {"rotary_dim": 33}, "rotary_dim: expected an even number"),
    "lists that differ": (
        "HunYuanMoEV1", {"num_experts": 4, "moe_topk": [1, 1, 2]}, "moe_topk: expected the same in all",
    ),
    "an empty list": ("HunYuanMoEV1", {"num_experts": []}, "num_experts: expected the same in all"),
    "no mlp beside them": ("HunYuanMoEV1", {"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe: expected True"),
    "shared K and V": ("HunYuanMoEV1", {"use_cla": True}, "use_cla: expected False, got True"),
    "a larger least sum": ("Ernie4_5_Moe", {"moe_norm_min": 0.1}, "moe_norm_min: expected at most 1e-06"),
    "no such tensor": ("Ernie4_5_Moe", {"moe_use_aux_free": False}, "moe_use_aux_free: expected True"),
    "Mamba": ("GraniteMoeHybrid", {"layer_types": ["mamba", "attention"]}, "layer_types: expected 'attent"),
    "Mamba by default": ("GraniteMoeHybrid", {}, "layer_types: .* got None"),
    "other positions": (
        "GraniteMoeHybrid", {"layer_types": ["attention"], "position_embedding_type": "alibi"},
        "position_embedding_type: expected None or 'rope', got 'alibi'",
    ),
    "a factor": ("Mixtral", {"routed_scaling_factor": 2.5}, "routed_scaling_factor: expected none"),
    "groups": ("Qwen3Moe", {"n_group": 4}, "n_group: expected none in a Qwen3MoeForCausalLM"),
    "a score": ("Qwen3Moe", {"scoring_func": "sigmoid"}, "scoring_func: expected none"),
    "shared experts": ("Olmoe", {"n_shared_experts": 1}, "n_shared_experts: expected none"),
    "a sum": ("Mixtral", {"norm_topk_prob": True}, "norm_topk_prob: expected none"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BAD, *OTHERS])
def test_bad_entries_of_mixtures_are_named(case):
    """Those that are impossible, and those that ask for what the family does not compute."""
    family, entries, text = BAD.get(case) or OTHERS[case]
    error = CheckpointError if case in BAD else UnsupportedError
    with pytest.raises(error, match=text) as raised:
        read(family, entries)
    assert str(raised.value).startswith("config.json: ")


def test_released_entries_of_mixtures_are_read():
    """Beside those that transformers' classes read."""
    m2 = {"rotary_dim": 64, "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True}
    m2 |= {"scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3}
    own = read("MiniMaxM2", m2)
    assert own.ropes["all"].rotary_dim == 64
    assert own.ignored == ("model.layers.62.", "model.layers.63.", "model.layers.64.")
    for count in ({}, {"num_nextn_predict_layers": 1}, {"num_mtp_layers": 1}):
        assert read("Glm4Moe", {"head_dim": 128, **count}).ignored == ("model.layers.46.",)
    hunyuan = {
        "num_experts": 64,
        "moe_topk": [8] * 32,
        "moe_intermediate_size": [3072] * 32,
        "use_mla": False,
    }
    hunyuan |= {
        "intermediate_size": 3072,
        "num_shared_expert": [1] * 32,
        "use_qk_norm": True,
        "use_cla": False,
    }
    hunyuan |= {"norm_topk_prob": True, "kv_lora_rank": 512, "routed_scaling_factor": False, "n_group": False}
    assert mixture(read("HunYuanMoEV1", hunyuan)) == (64, 3072, 8)
    assert read("Ernie4_5_Moe", {"moe_layer_end_index": None, "moe_gate_act": None}).layers[27].sparse
    dots = {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_layer_freq": 1}
    assert read("Dots1", dots | {"scoring_func": "noaux_tc"}).experts.shared_width == 2 * 1408


def test_short_and_long_requests_have_their_own_factors():
    """Phi 3.5 MoE's cos and sin are multiplied by stored numbers."""
    longrope = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    longrope |= {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 64}
    rope = read("Phimoe", {**SIZES, "rope_scaling": longrope}).ropes["all"]
    assert (rope.factors[0], rope.length) == (4.0, 1.3)
    short = rope.of_length(64)
    assert (short.factors[0], short.length) == (1.0, 1.1) and rope.of_length(65) == rope
    only = {**SIZES, "max_position_embeddings": 64, "rope_scaling": longrope}
    assert read("Phimoe", only).ropes["all"].length == 1.1


def test_number_of_experts_is_read_under_both_of_its_names():
    released, saved = (
        read("Qwen3Moe", {**MIXTURE, name: 3}) for name in ("num_experts", "num_local_experts")
    )
    assert released == saved


@pytest.mark.parametrize(
    "change, text",
    [
        ({"num_experts": 0}, "num_experts: expected a positive integer.* got 0"),
        ({"num_experts": 3, "moe_intermediate_size": None}, "moe_intermediate_size: expected .*, got None"),
        ({"num_experts": None}, "num_experts: expected .*, got None"),
    ],
)
def test_a_mixture_that_is_none_is_refused(change, text):
    with pytest.raises(CheckpointError, match=text):
        read("Qwen3Moe", {**MIXTURE, **change})


@pytest.mark.parametrize("change", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
def test_dense_layers_of_a_mixture_are_listed(change):
    layers = read("Qwen3Moe", {**MIXTURE, "num_experts": 3, **change}).layers
    assert [layer.sparse for layer in layers] == (
        [False, True, False] if "decoder_sparse_step" in change else [False, True, True]
    )


@pytest.mark.parametrize(
    "change, sparse",
    [
        ({}, [0, 1, 1, 1, 1, 1]),
        ({"moe_layer_end_index": 3}, [0, 1, 1, 1, 0, 0]),
        ({"moe_layer_end_index": 9}, [0, 1, 1, 1, 1, 1]),
        ({"moe_layer_interval": 2}, [0, 1, 0, 1, 0, 1]),
        ({"moe_layer_start_index": 2, "moe_layer_interval": 3}, [0, 0, 1, 0, 0, 1]),
    ],
)
def test_ernie_has_mixtures_in_every_so_many_of_some_layers(change, sparse):
    """As the class of transformers makes them."""
    config = {**SIZES, "num_hidden_layers": 6, "moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 8}
    with torch.device("meta"):
        model = transformers.Ernie4_5_MoeForCausalLM(of_class("Ernie4_5_Moe", config | change))
    assert [hasattr(layer.mlp, "experts") for layer in model.model.layers] == list(map(bool, sparse))
    assert [layer.sparse for layer in read("Ernie4_5_Moe", config | change).layers] == list(map(bool, sparse))


def test_granite_4_without_experts_is_dense():
    entries = {
        **SIZES,
        "layer_types": ["attention"] * 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 160,
    }
    arch = read("GraniteMoeHybrid", entries | {"position_embedding_type": "rope"})
    assert arch.experts is None and arch.intermediate_size == 160
    assert [parts for _, parts in arch.fuse[2:]] == [
        ("shared_mlp.input_linear",),
        ("shared_mlp.output_linear",),
    ]
    assert {layer.rope for layer in arch.layers} == {"all"}
    assert {layer.rope for layer in read("GraniteMoeHybrid", entries).layers} == {None}
