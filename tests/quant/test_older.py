"""Entries for transformers 4: transformers 5 and qrt read the same numbers with them as without."""

import json

import pytest
import transformers as hf

from qrt.arch.read import read_arch
from qrt.quant.checkpoint.making.older import older_tokenizer, with_older_entries

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
GROUPS = {**SIZES, "num_key_value_heads": 2}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
YARN = {"rope_type": "yarn", "rope_theta": 3e5, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope", "rope_theta": 2e4, "partial_rotary_factor": 0.5, "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4, "original_max_position_embeddings": 64,
}  # fmt: skip
PART = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}
# class, its own sizes, rope_parameters -> the entries that 4.57.3 reads, as a run of it has shown
CASES = {
    "llama": (hf.LlamaConfig, GROUPS, PART | {"partial_rotary_factor": 1.0}, {"rope_theta": 5e4}),
    "qwen3": (
        hf.Qwen3Config, GROUPS | {"head_dim": 16}, YARN,
        {"rope_theta": 3e5, "rope_scaling": {key: YARN[key] for key in YARN if key != "rope_theta"}},
    ),
    "gemma3": (
        hf.Gemma3TextConfig, GROUPS | KINDS | {"head_dim": 16}, LAYERS,
        {"rope_theta": 2e6, "rope_local_base_freq": 3e4,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "phi3": (
        hf.Phi3Config, GROUPS | {"pad_token_id": 0, "original_max_position_embeddings": 64}, LONG,
        {"rope_theta": 2e4, "partial_rotary_factor": 0.5,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
    ),
    "gpt_neox": (hf.GPTNeoXConfig, SIZES, PART, {"rotary_emb_base": 5e4, "rotary_pct": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_same_numbers_with_and_without(name, tmp_path):
    kind, sizes, rope, wanted = CASES[name]
    made = kind(**sizes, rope_parameters=json.loads(json.dumps(rope)))
    architecture = {"gpt_neox": "GPTNeoXForCausalLM", "gemma3": "Gemma3ForCausalLM"}.get(name)
    config = json.loads(made.to_json_string(use_diff=False))
    config["architectures"] = [architecture or f"{name.capitalize()}ForCausalLM"]
    older = with_older_entries(config)
    assert {key: older[key] for key in wanted} == wanted
    read = kind.from_dict(older).rope_parameters
    read.pop("type", None)  # the older name of rope_type, which is there too
    assert read == kind.from_dict(config).rope_parameters
    assert read_arch(older, "older").ropes == read_arch(config, "newer").ropes


def test_text_halves_and_what_has_no_older_entry():
    section = {"rope_type": "default", "rope_theta": 7e5, "mrope_section": [2, 3, 3]}
    text = with_older_entries({"text_config": {"rope_parameters": section}})["text_config"]
    assert text["rope_theta"] == 7e5 and text["rope_scaling"]["mrope_section"] == [2, 3, 3]
    for config in (
        {"rope_parameters": None},
        {"rope_theta": 3.0},
        {"model_type": "olmo3", "rope_parameters": LAYERS},
    ):
        assert with_older_entries(config) == config


def test_a_tokenizers_class_and_tokens():
    given = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|user|>"], "pad_token": "<p>"}
    older = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<|user|>"]}
    assert older_tokenizer(given) == {**older, "pad_token": "<p>"}
    named = {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": {"image_token": "<i>"}}
    assert older_tokenizer(named) == named
