"""What is read from a config.json, against transformers' own reading of it."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
import transformers.models.auto.modeling_auto

from qrt.arch import ARCHS, Arch
from qrt.arch.read import architecture, read_arch
from qrt.definitions.rope import frequencies
from qrt.errors import CheckpointError, UnsupportedError
from qrt_eval.reports.models import NEEDED

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
OLD_THETA = {"rope_theta": 500000.0}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
ORIGINAL_BESIDE = {"original_max_position_embeddings": 512}
FULL, SLIDES = "full_attention", "sliding_attention"
CASES = {
    "llama-2": ("Llama", {}),
    "llama-2-mha": ("Llama", {"num_key_value_heads": None}),
    "llama-linear-old": ("Llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-yarn-old": ("Llama", {"rope_scaling": {"type": "yarn", "factor": 16.0, **MSCALES}}),
    "llama-3-old": ("Llama", OLD_THETA),
    "llama-3.1-old": ("Llama", {**OLD_THETA, "rope_scaling": LLAMA3, "eos_token_id": [5, 6]}),
    "llama-3.1-original-beside": ("Llama", {**OLD_THETA, "rope_scaling": LLAMA3, **ORIGINAL_BESIDE}),
    "llama-yarn-original-beside": (
        "Llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, **ORIGINAL_BESIDE},
    ),
    "llama-3.1-new": ("Llama", {"rope_parameters": {**OLD_THETA, **LLAMA3}, "tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-v0.1": ("Mistral", {"sliding_window": 1024, **OLD_THETA}),
    "mistral-v0.3": ("Mistral", {"sliding_window": None, "head_dim": 64, "rope_parameters": OLD_THETA}),
    "mistral-default-window": ("Mistral", {}),
    "mistral-without-biases": ("Mistral", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"rope_theta": 1e6, "sliding_window": 2048, "use_sliding_window": False}),
    "qwen2.5-upper-layers-slide": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 2048, "max_window_layers": 1},
    ),
    "qwen2.5-no-layer-slides": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 2048, "max_window_layers": 3},
    ),
    "qwen2.5-a-lower-layer-slides": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 2048, "layer_types": [SLIDES, FULL, FULL]},
    ),
    "qwen2.5-no-layer-slides-as-listed": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 2048,
            "max_window_layers": 0,
            "layer_types": [FULL] * 3,
        },
    ),
    "qwen3": (
        "Qwen3",
        {"head_dim": 128, "rope_parameters": {"rope_theta": 1e6}, "tie_word_embeddings": True},
    ),
    "qwen3-yarn": ("Qwen3", {"head_dim": 128, "rope_parameters": {"rope_theta": 1e6, **YARN}}),
    "qwen3-biased": ("Qwen3", {"head_dim": 128, "attention_bias": True, "rope_theta": 1e6}),
}


def read(family: str, config: dict) -> Arch:
    return read_arch({**config, "architectures": [f"{family}ForCausalLM"]}, "model")


def window_of(arch: Arch) -> int | None:
    """Return the window of the layers that slide, None if none does."""
    return max(layer.window or 0 for layer in arch.layers) or None


def settled(family: str, config: dict) -> transformers.PretrainedConfig:
    """transformers' config object with every default filled in."""
    return getattr(transformers, f"{family}Config")(**config)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("saved_by", ["hand", "transformers"])
def test_agrees_with_transformers(case, saved_by):
    family, extra = CASES[case]
    raw = {**SIZES, **extra}
    truth = settled(family, json.loads(json.dumps(raw)))
    ours = read(family, raw if saved_by == "hand" else json.loads(truth.to_json_string()))
    for name, theirs in (
        ("vocab_size", truth.vocab_size),
        ("hidden_size", truth.hidden_size),
        ("intermediate_size", truth.intermediate_size),
        ("num_layers", truth.num_hidden_layers),
        ("num_heads", truth.num_attention_heads),
        ("num_kv_heads", truth.num_key_value_heads),
        ("head_dim", getattr(truth, "head_dim", truth.hidden_size // truth.num_attention_heads)),
        ("tied_embeddings", truth.tie_word_embeddings),
    ):
        assert getattr(ours, name) == theirs, name
    assert ours.norm.eps == truth.rms_norm_eps
    truth.standardize_rope_params()  # as its models do
    rope = truth.rope_parameters
    assert (ours.ropes["all"].kind, ours.ropes["all"].theta) == (rope["rope_type"], rope["rope_theta"])
    if ours.ropes["all"].kind != "default":
        assert ours.ropes["all"].factor == rope["factor"]
    if ours.ropes["all"].kind == "llama3":
        assert ours.ropes["all"].low_freq_factor == rope["low_freq_factor"]
        assert ours.ropes["all"].high_freq_factor == rope["high_freq_factor"]
        assert ours.ropes["all"].original_max_position == rope["original_max_position_embeddings"]
    if ours.ropes["all"].kind == "yarn":
        theirs = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](truth, "cpu")[1]
        assert ours.ropes["all"].length == pytest.approx(theirs, rel=1e-12) and theirs != 1
    # what RoPE stretches is the context the model was trained for
    trained = rope.get("original_max_position_embeddings") if ours.ropes["all"].kind == "yarn" else None
    stretch = ours.ropes["all"].factor if ours.ropes["all"].kind in ("linear", "yarn") else 1
    assert ours.max_position == (trained or truth.max_position_embeddings) * stretch
    if "layer_types" in truth:
        slides = "sliding_attention" in truth.layer_types
        assert window_of(ours) == (truth.sliding_window if slides else None)
    else:
        assert window_of(ours) == getattr(truth, "sliding_window", None)


@pytest.mark.parametrize("case", CASES)
def test_biases_and_norms_are_those_of_the_transformers_model(case):
    family, extra = CASES[case]
    raw = {**SIZES, **extra}
    ours = read(family, raw)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(settled(family, json.loads(json.dumps(raw))))
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert (linear.bias is not None) == ours.qkv_bias
    assert (attention.o_proj.bias is not None) == ours.o_bias
    assert all(
        (linear.bias is not None) == ours.mlp_bias for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    assert hasattr(attention, "q_norm") == hasattr(attention, "k_norm") == (ours.qk_norm == "head")


def test_alpha_of_dynamic_rope_makes_theta_larger():
    """HunYuan's; against its class in transformers, which computes the frequencies when it is made."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
    config = {**SIZES, "head_dim": 32, "rope_parameters": rope}
    model = transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense
    truth = model.HunYuanDenseV1RotaryEmbedding(settled("HunYuanDenseV1", json.loads(json.dumps(config))))
    for entry in ("rope_parameters", "rope_scaling"):
        own = {key: value for key, value in config.items() if key != "rope_parameters"} | {entry: rope}
        got = frequencies(read("HunYuanDenseV1", own).ropes["all"])
        torch.testing.assert_close(got.float(), truth.inv_freq, rtol=1e-5, atol=0)


def test_eos_and_dtype():
    assert read("Llama", SIZES).eos_token_ids == ()
    assert read("Llama", {**SIZES, "eos_token_id": 2}).eos_token_ids == (2,)
    assert read("Llama", {**SIZES, "eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    for wrong in ("x", [1, None], [[1]]):
        with pytest.raises(CheckpointError, match="eos_token_id: expected a token id or a list"):
            read("Llama", {**SIZES, "eos_token_id": wrong})
    for entries, dtype in (
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
    ):
        assert read("Llama", {**SIZES, **entries}).dtype == dtype
        assert transformers.LlamaConfig(**entries).dtype == getattr(torch, dtype)


BAD = {
    "no layers": ({"num_hidden_layers": None}, CheckpointError, "num_hidden_layers: expected .*, got None"),
    "size as text": ({"hidden_size": "256"}, CheckpointError, "hidden_size: expected .*, got '256'"),
    "size as bool": ({"vocab_size": True}, CheckpointError, "vocab_size: expected .*, got True"),
    "negative": ({"intermediate_size": -1}, CheckpointError, "intermediate_size: expected .*, got -1"),
    "vocabulary": (
        {"vocab_size": 10**12},
        CheckpointError,
        "vocab_size: expected at most.* got 1000000000000",
    ),
    "context": ({"max_position_embeddings": 2**30}, CheckpointError, "at most 16,777,216"),
    "layers": ({"num_hidden_layers": 10**6}, CheckpointError, "num_hidden_layers: expected at most 4,096"),
    "a number of many digits": ({"hidden_size": 10**400}, CheckpointError, "hidden_size"),
    "heads": (
        {"num_key_value_heads": 3},
        CheckpointError,
        "num_attention_heads: expected a multiple of .* 3, got 8",
    ),
    "odd head": ({"head_dim": 33}, UnsupportedError, "head_dim: expected an even number, .*, got 33"),
    "theta as text": ({"rope_theta": "big"}, CheckpointError, "rope_theta: expected .*, got 'big'"),
    "eps of zero": ({"rms_norm_eps": 0}, CheckpointError, "rms_norm_eps: expected .*, got 0"),
    "activation": ({"hidden_act": "tanh"}, UnsupportedError, "hidden_act: expected .*, got 'tanh'"),
    "alpha": (
        {"rope_scaling": {"type": "dynamic", "alpha": 1e300}},
        CheckpointError,
        "alpha: expected at most 16,777,216",
    ),
    "another rope": (
        {"rope_scaling": {"type": "ntk", "factor": 4.0}},
        UnsupportedError,
        "RoPE type: expected .*, got 'ntk'",
    ),
    "rope as a number": (
        {"rope_scaling": 2.0},
        CheckpointError,
        "rope_scaling: expected an object.* got 2.0",
    ),
    "stretched": ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, CheckpointError, "as RoPE stretches it"),
    "theta of one": ({"rope_theta": 1}, CheckpointError, "rope_theta: expected more than 1.* got 1.0"),
    "partial": (
        {"partial_rotary_factor": 1.5},
        CheckpointError,
        "partial_rotary_factor: expected .*, got 1.5",
    ),
    "an odd part": (
        {"partial_rotary_factor": 0.1},
        UnsupportedError,
        "expected an even number of rotated channels, got 3,",
    ),
    "entry of another family": (
        {"embedding_multiplier": 12.0},
        UnsupportedError,
        "embedding_multiplier: expected none",
    ),
    "longrope without factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        CheckpointError,
        "short_factor as a list of 16",
    ),
    "longrope without long factors": (
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 16,
                "original_max_position_embeddings": 64,
            }
        },
        CheckpointError,
        "long_factor as a list of 16",
    ),
    "linear without factor": (
        {"rope_scaling": {"type": "linear"}},
        CheckpointError,
        "factor: expected .*, got None",
    ),
    "llama3 without its numbers": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        CheckpointError,
        "low_freq_factor: expected .*, got None",
    ),
    "rope per layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        UnsupportedError,
        "rope_parameters: expected one object for all layers",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_config_names_the_entry(case):
    change, error, text = BAD[case]
    with pytest.raises(error, match=text) as raised:
        read("Llama", {**SIZES, **change})
    assert "config.json" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("change, text", [
    ({"sliding_window": -5, "max_window_layers": 0}, "sliding_window: expected a positive integer.* got -5"),
    ({"sliding_window": "64", "max_window_layers": 0}, "sliding_window: expected .*, got '64'"),
    ({"num_hidden_layers": None}, "num_hidden_layers: expected .*, got None"),
    ({"layer_types": 5}, "layer_types: expected list or null.* got 5"),
    ({"max_window_layers": "all"}, "max_window_layers: expected int.* got 'all'"),
    ({"max_window_layers": None}, "max_window_layers: expected int.* got None"),
    ({"use_sliding_window": "yes"}, "use_sliding_window: expected bool.* got 'yes'"),
])  # fmt: skip
def test_bad_windows_are_named(change, text):
    with pytest.raises(CheckpointError, match=text):
        read("Qwen2", {**SIZES, "use_sliding_window": True, **change})


# A config whose entries are no family's defaults. eos_token_id has none in qrt: the tokenizer and
# generation_config.json name the ends of text too, and Llama's 2 is an ordinary token in other vocabularies.
UNUSUAL = {
    "vocab_size": 1000,
    "hidden_size": 3072,
    "intermediate_size": 512,
    "num_hidden_layers": 30,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "hidden_act": "silu",
    "max_position_embeddings": 4000,
    "rms_norm_eps": 1e-3,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "qkv_bias": False,
    "use_sliding_window": True,
    "sliding_window": 333,
    "max_window_layers": 29,
    "layer_types": [FULL] * 29 + [SLIDES],
    "moe_intermediate_size": 96,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 9,
    "num_experts_per_tok": 2,
}
DENSE = ["Llama", "Mistral", "Qwen2", "Qwen3"]
FAMILIES = [*DENSE, "Mixtral", "Qwen2Moe", "Qwen3Moe"]


def facts(family: str, entries: dict) -> dict:
    """Return what qrt reads from a config, by transformers' names."""
    if family in DENSE:  # which refuse experts
        entries = {key: value for key, value in entries.items() if key != "num_experts"}
    ours = read(family, entries)
    return {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "num_hidden_layers": ours.num_layers,
        "num_attention_heads": ours.num_heads,
        "num_key_value_heads": ours.num_kv_heads,
        "head_dim": ours.head_dim,
        "max_position_embeddings": ours.max_position,
        "rms_norm_eps": ours.norm.eps,
        "rope_theta": ours.ropes["all"].theta,
        "tie_word_embeddings": ours.tied_embeddings,
        "sliding_window": window_of(ours),
        "biases": (ours.qkv_bias, ours.o_bias, ours.mlp_bias),
    } | ({} if ours.experts is None else {"experts": mixture(ours)})


def mixture(ours: Arch) -> tuple:
    """Return how many experts there are, how wide they are, and how many a token has."""
    return ours.experts.count, ours.experts.width, ours.experts.router.top_k


# which projections have biases, as the modeling files of transformers write it
BIASES = {
    "Llama": lambda c: (c.attention_bias, c.attention_bias, c.mlp_bias),
    "Qwen2": lambda c: (True, False, False),
    "Qwen2Moe": lambda c: (c.qkv_bias, False, False),
    "Qwen3": lambda c: (c.attention_bias, c.attention_bias, False),
    "Qwen3Moe": lambda c: (c.attention_bias, c.attention_bias, False),
}


def true_facts(family: str, entries: dict) -> dict:
    """Return the same facts from transformers' config class of the family."""
    truth = settled(family, json.loads(json.dumps(entries)))
    inner = "intermediate_size" if family == "Mixtral" else "moe_intermediate_size"
    heads = truth.num_attention_heads
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    slides = family in ("Mistral", "Mixtral", "Qwen3Moe")
    slides = slides or (family.startswith("Qwen") and SLIDES in truth.layer_types)
    return {
        **{name: getattr(truth, name) for name in (*sizes, "rms_norm_eps", "tie_word_embeddings")},
        "intermediate_size": truth.intermediate_size,
        "num_key_value_heads": truth.num_key_value_heads,
        "head_dim": getattr(truth, "head_dim", None) or truth.hidden_size // heads,
        "rope_theta": truth.rope_parameters["rope_theta"],
        "sliding_window": (getattr(truth, "sliding_window", None) or None) if slides else None,
        "biases": BIASES.get(family, lambda c: (False, False, False))(truth),
    } | (
        {}
        if family in DENSE
        else {"experts": (truth.num_experts, getattr(truth, inner), truth.num_experts_per_tok)}
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("entry", UNUSUAL)
def test_missing_entry_has_its_family_default(family, entry):
    entries = {key: value for key, value in UNUSUAL.items() if key != entry}
    if entry == "num_hidden_layers":
        del entries["layer_types"]  # transformers compares its length
    assert facts(family, entries) == true_facts(family, entries)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_config_is_the_family_s_default(family):
    assert facts(family, {}) == true_facts(family, {})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("entry", UNUSUAL)
def test_null_means_what_transformers_makes_of_it(family, entry):
    """Both refuse null, or read the same. Older transformers read null KV heads as the number of heads."""
    entries = {**UNUSUAL, entry: None}
    if entry == "num_key_value_heads":
        assert facts(family, entries)[entry] == UNUSUAL["num_attention_heads"]
        return
    try:
        truth = true_facts(family, entries)
        refused = None in (truth["rope_theta"], *truth.get("experts", ()))  # transformers' models fail later
    except huggingface_hub.errors.StrictDataclassError:
        refused = True
    if refused:
        with pytest.raises((CheckpointError, UnsupportedError), match=f"config.json: {entry}: expected"):
            facts(family, entries)
    else:
        assert facts(family, entries) == truth


def test_unknown_architecture_lists_the_known_and_suggests_none():
    """A similar architecture computes another function, so its name must not be suggested."""
    with pytest.raises(UnsupportedError, match=r"'Qwen2VLForCausalLM' \(known: LlamaForCausalLM.*\)$"):
        ARCHS["Qwen2VLForCausalLM"]


def test_model_type_names_the_architecture_when_none_is_given():
    truth = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    more = (
        "Gemma",
        "Olmo2",
        "SmolLM3",
        "Cohere2",
        "Phimoe",
        "Ernie4_5",
        "Ernie4_5_Moe",
        "Glm4Moe",
        "MiniMaxM2",
    )
    for name in (f"{family}ForCausalLM" for family in (*FAMILIES, *more)):
        kind = settled(name.removesuffix("ForCausalLM"), {}).model_type
        assert architecture({"model_type": kind}, Path("x")) == truth[kind] == name
        assert architecture({"model_type": "gemma9", "architectures": [name]}, Path("x")) == name
    for entries in ({}, {"model_type": "gemma9"}, {"model_type": 5}, {"architectures": [name, name]}):
        with pytest.raises(CheckpointError, match="x: config.json: architectures: expected a list"):
            architecture(entries, Path("x"))


@pytest.mark.parametrize("family", DENSE)
def test_smoothing_pairs_name_projections_or_norms_of_a_layer(family):
    arch = read(family, {})
    norms = {"input_layernorm", "post_attention_layernorm"}
    for pair in arch.smooth:
        assert {pair.source} <= norms | set(arch.projections)
        assert set(pair.readers) <= set(arch.projections)
    assert len(set(arch.projections)) == 7


# the config classes that transformers has for the registry's other families
CLASSES = {
    name: transformers.CONFIG_MAPPING[kind]
    for kind, name in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if name in ARCHS and kind in transformers.CONFIG_MAPPING and not name.endswith("Generation")
}


@pytest.mark.parametrize("name", CLASSES)
def test_an_empty_config_means_the_class_defaults(name):
    """Released configs leave entries out and mean the default of their class, which is not always Llama's."""
    needed = NEEDED.get(name, {})
    truth, ours = CLASSES[name](**needed), read_arch({"architectures": [name], **needed}, "model")
    heads = truth.num_attention_heads
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers, ours.num_heads) == (
        truth.vocab_size, truth.hidden_size, truth.num_hidden_layers, heads,
    )  # fmt: skip
    assert ours.head_dim == (getattr(truth, "head_dim", None) or truth.hidden_size // heads)
    if name not in ("BloomForCausalLM",):
        assert ours.max_position == getattr(truth, "max_position_embeddings", None) or truth.max_seq_len
    assert ours.tied_embeddings == truth.tie_word_embeddings
    for entry in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"):
        if hasattr(truth, f"{entry}_mlp"):  # Llama 4, of dense layers
            entry += "_mlp"
        if isinstance(getattr(truth, entry, None), int) and not (ours.experts and entry.startswith("moe")):
            assert ours.intermediate_size == getattr(truth, entry), entry
    if isinstance(getattr(truth, "num_key_value_heads", None), int):
        assert ours.num_kv_heads == truth.num_key_value_heads
    eps = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    assert ours.norm.eps == next((getattr(truth, e) for e in eps if hasattr(truth, e)), 1e-5)
    window = getattr(truth, "sliding_window", None) or 0
    kinds = getattr(truth, "layer_types", None)
    if kinds is not None and getattr(truth, "use_sliding_window", True):
        slid = [window if kind == "sliding_attention" else 0 for kind in kinds]
        assert [layer.window or 0 for layer in ours.layers] == slid


def test_a_window_of_the_whole_context_is_none():
    """Phi-3's 128k models say 262,144; without a window they keep the faster kernel of prompts."""
    wide = read("Mistral", {**SIZES, "sliding_window": 4096})
    assert wide.layers[0].window == 4096 and wide.reaches == ((0, 0),)
    assert read("Mistral", {**SIZES, "sliding_window": 4095}).reaches == ((4095, 0),)


@pytest.mark.parametrize("name, entry", [("BloomForCausalLM", "n_head"), ("MptForCausalLM", "n_heads")])
def test_slopes_are_made_for_a_sane_number_of_heads(name, entry):
    with pytest.raises(CheckpointError, match="attention heads: expected at most 4,096, got 16,777,216"):
        read_arch({"architectures": [name], entry: 2**24}, "model")


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
def test_the_text_half_refuses_entries_of_another_family(name):
    config = {"architectures": [name], "text_config": {"embedding_multiplier": 12.0}}
    with pytest.raises(UnsupportedError, match="embedding_multiplier: expected none"):
        read_arch(config, "model")


def test_a_single_expert_is_an_ordinary_mlp():
    assert read("Llama", {**SIZES, "num_experts": 1}).experts is None
    with pytest.raises(UnsupportedError, match="num_experts: expected none"):
        read("Llama", {**SIZES, "num_experts": 2})
