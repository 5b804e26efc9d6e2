"""What is read from a Llama 4 config.json, as it is published, against transformers' config classes."""

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qrt.arch.read import read_arch
from qrt.definitions.rope import frequencies
from qrt.errors import CheckpointError, UnsupportedError

SCOUT = {  # the text half of the 16 experts' model
    "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True,
    "floor_scale": 8192, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760, "model_type": "llama4_text", "moe_layers": list(range(48)),
    "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40, "num_experts_per_tok": 1,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "use_qk_norm": True, "vocab_size": 202048, "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3",
        "original_max_position_embeddings": 8192},
}  # fmt: skip
MAVERICK = {"interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False}


def read(**changes):
    return read_arch({"architectures": ["Llama4ForCausalLM"], **SCOUT, **changes}, "model")


def test_scout():
    arch = read()
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": SCOUT, "vision_config": {}}
    images = read_arch(whole, "model")
    assert images.layers == arch.layers and images.names.q == arch.names.q
    assert images.names.layers == "language_model.model.layers"
    assert [arch.reach(i).segment for i in range(8)] == [8192, 8192, 8192, 0] * 2
    assert [layer.q_scaled for layer in arch.layers[:4]] == [False, False, False, True]
    assert all(layer.sparse for layer in arch.layers) and arch.qk_norm == "unit"
    assert (arch.experts.count, arch.experts.width, arch.intermediate_size) == (16, 8192, 16384)


def test_rope_is_that_of_transformers():
    """Its two limits are equal: nothing lies between kept and stretched channels."""
    rope, theirs = read().ropes["all"], Llama4TextConfig(**SCOUT)
    theirs.standardize_rope_params()
    want, length = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    torch.testing.assert_close(frequencies(rope).float(), want, rtol=1e-6, atol=0)
    assert rope.pairs == "neighbours" and length == rope.length == 1


@pytest.mark.parametrize("entries", [
    {}, MAVERICK, MAVERICK | {"moe_layers": [1, 2]}, {"no_rope_layers": [], "no_rope_layer_interval": 3},
    {"layer_types": ["full_attention", "chunked_attention"] * 24},
])  # fmt: skip
def test_layers_are_those_of_transformers(entries):
    given = {key: value for key, value in SCOUT.items() if key not in ("moe_layers", "no_rope_layers")}
    given |= entries
    arch = read_arch({"architectures": ["Llama4ForCausalLM"], **given}, "model")
    theirs = Llama4TextConfig(**given)
    assert [i for i, layer in enumerate(arch.layers) if layer.sparse] == theirs.moe_layers
    assert [int(layer.rope is not None) for layer in arch.layers] == theirs.no_rope_layers
    assert [layer.segment is not None for layer in arch.layers] == [
        kind == "chunked_attention" for kind in theirs.layer_types
    ]


def test_segments_of_the_whole_context_are_none():
    assert read(max_position_embeddings=8192).reaches == ((0, 0),)


@pytest.mark.parametrize("change, error, text", [
    ({"no_rope_layers": [1] * 47}, CheckpointError, "no_rope_layers and layer_types for 48 layers, got 47"),
    ({"layer_types": ["sliding_attention"] * 48}, UnsupportedError, "got 'sliding_attention'"),
    ({"layer_types": [{}] * 48}, UnsupportedError, "layer_types: expected chunked_attention or"),
    ({"attention_chunk_size": None}, CheckpointError, "attention_chunk_size: expected a positive integer"),
    ({"floor_scale": 0}, CheckpointError, "floor_scale: expected a positive integer, got 0"),
])  # fmt: skip
def test_bad_entries_are_named(change, error, text):
    with pytest.raises(error, match=text):
        read(**change)
