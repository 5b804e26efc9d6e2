"""Names of other engines: values that ask for something are refused with a remedy, others are accepted."""

import copy
import pickle

import numpy as np
import pytest

from qrt.compat.fields import FIELDS, refuse_arguments
from qrt.compat.settings import SETTINGS, has_no_effect
from qrt.errors import ConfigError, UnsupportedError
from qrt.request.sampling import SamplingParams

# vLLM's SamplingParams with the defaults of vLLM 0.8 to 0.11, those left out that qrt has too
VLLM_DEFAULTS = {
    "prompt_logprob_token_ids": None, "prompt_logprob_start": None, "logprob_token_ids": None,
    "flat_logprobs": False, "spaces_between_special_tokens": True,
    "stream_interval": None, "skip_clone": False, "output_text_buffer_length": 0, "structured_outputs": None,
    "guided_decoding": None,
    "extra_args": None, "skip_reading_prefix_cache": None, "thinking_token_budget": None,
    "repetition_detection": None, "routed_experts_prompt_start": 0, "trace_decode_token_ids": None,
    "logits_processors": None, "truncate_prompt_tokens": None, "use_beam_search": False,
    "length_penalty": 1.0, "early_stopping": False, "output_kind": 0,
}  # fmt: skip
ASKING = {
    "grammar": 'root ::= "yes" | "no"', "json_schema": {}, "guided_regex": "[0-9]+", "format": "json",
    "response_format": {"type": "json_object"}, "mirostat": 1, "dry_multiplier": 0.5, "xtc_probability": 0.1,
    "top_n_sigma": 2.0, "dynatemp_range": 0.3, "typical_p": 0.9, "tfs_z": 0.95, "top_a": 0.1,
    "samplers": ["min_p", "temperature"], "repeat_penalty": 1.1, "no_repeat_ngram_size": 3, "num_beams": 2,
    "n_predict": -1, "num_predict": 5, "do_sample": False, "functions": [{"name": "f"}], "think": False,
    "system": "Be brief.", "options": {"temperature": 0}, "images": ["AAAA"], "lora": [{"id": 0, "scale": 1}],
    "web_search_options": {}, "verbosity": "low", "n_probs": 5, "return_tokens": True,
}  # fmt: skip
ASKING_NOTHING = {
    "grammar": "", "guided_regex": None, "response_format": {"type": "text", "json_schema": None},
    "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75,
    "dry_sequence_breakers": ["\n", ":"], "xtc_probability": 0, "xtc_threshold": 0.1, "top_n_sigma": -1,
    "dynatemp_range": 0, "dynatemp_exponent": 1, "typical_p": 1, "tfs_z": 1.0, "top_a": 0, "samplers": [],
    "repeat_penalty": 1, "repeat_last_n": 64, "num_beams": 1, "do_sample": True, "functions": [],
    "function_call": "none", "options": {}, "images": [], "lora": [], "verbosity": "medium", "n_probs": 0,
    "modalities": ["text"], "stop_regex": "", "suffix": "",
}  # fmt: skip


@pytest.mark.parametrize("name", ASKING)
def test_effective_fields_are_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=f"^{name}: \\w+"):
        SamplingParams(**{name: ASKING[name]})


@pytest.mark.parametrize("fields", [VLLM_DEFAULTS, ASKING_NOTHING], ids=["vllm", "others"])
def test_fields_without_effect_are_accepted(fields):
    for name, value in fields.items():
        assert SamplingParams(top_k=5, **{name: value}) == SamplingParams(top_k=5), name
    assert SamplingParams(**fields) == SamplingParams()


def test_some_fields_count_only_beside_another():
    for lead, value, follower in (
        ("presence_penalty", 1, "repeat_last_n"),
        ("repetition_penalty", 1.1, "repeat_last_n"),
    ):
        with pytest.raises(UnsupportedError, match=f"^{follower}: "):
            SamplingParams(**{lead: value, follower: 64})
    with pytest.raises(UnsupportedError, match="dry_base: .*; dry_multiplier: "):
        SamplingParams(dry_multiplier=0.8, dry_base=2)
    everything = SamplingParams(repetition_penalty=1.1, repetition_penalty_range=0, repeat_last_n=-1)
    assert everything == SamplingParams(repetition_penalty=1.1)
    assert all(lead in FIELDS for entry in FIELDS.values() for lead in entry.only_with)
    assert not any(entry.only_with for entry in SETTINGS.values()), "settings are judged one by one"


def test_arrays_ask_for_something():
    for array in (np.zeros((2, 3)), [np.zeros(3)]):
        with pytest.raises(UnsupportedError, match="^prompt_embeds: "):
            SamplingParams(prompt_embeds=array)


def test_every_refusal_says_what_to_do_instead():
    """Every name with a value that can be refused has a remedy."""
    for name, entry in [*FIELDS.items(), *SETTINGS.items()]:
        assert entry.remedy or entry.has_no_effect(object()), name


# vLLM's EngineArgs with the defaults of 0.8 to 0.11, those left out that qrt has too
ENGINE_DEFAULTS = {
    "task": "auto", "skip_tokenizer_init": False,
    "tokenizer_mode": "auto", "trust_remote_code": False, "allowed_local_media_path": "",
    "pipeline_parallel_size": 1, "data_parallel_size": 1,
    "enable_expert_parallel": False, "block_size": None, "quantization": None, "rope_scaling": {},
    "rope_theta": None, "swap_space": 4, "cpu_offload_gb": 0, "max_seq_len_to_capture": 8192,
    "disable_custom_all_reduce": False, "disable_async_output_proc": False, "mm_processor_kwargs": None,
    "limit_mm_per_prompt": {}, "override_pooler_config": None, "enable_lora": False,
    "compilation_config": None, "distributed_executor_backend": None, "max_parallel_loading_workers": None,
    "max_loras": 1, "max_lora_rank": 16, "lora_dtype": "auto", "lora_extra_vocab_size": 256,
    "worker_cls": "auto", "long_lora_scaling_factors": None, "num_gpu_blocks_override": None,
    "model_impl": "auto", "max_logprobs": 20, "config_format": "auto", "disable_sliding_window": False,
    "use_v2_block_manager": True, "stream_interval": 1, "num_lookahead_slots": 0, "preemption_mode": None,
    "num_scheduler_steps": 1, "scheduler_delay_factor": 0.0, "speculative_config": None,
    "guided_decoding_backend": "auto", "logits_processors": None, "override_generation_config": {},
    "enable_sleep_mode": False, "additional_config": {}, "kv_transfer_config": None,
    "calculate_kv_scales": False, "enable_prompt_embeds": False, "disable_log_stats": True,
    "otlp_traces_endpoint": None, "collect_detailed_traces": None, "long_prefill_token_threshold": 0,
    "max_num_partial_prefills": 1, "logprobs_mode": "raw_logprobs",
}  # fmt: skip


def test_defaults_of_vllms_engine_are_accepted():
    assert [name for name, value in ENGINE_DEFAULTS.items() if not has_no_effect(name, value)] == []
    assert not has_no_effect("pipeline_parallel_size", 2) and not has_no_effect("quantization", "awq")


def test_an_unknown_argument_is_named():
    with pytest.raises(
        ConfigError, match="SamplingParams: unknown argument 'temprature'; did you mean 'temper"
    ):
        SamplingParams(temprature=1)
    with pytest.raises(ConfigError, match="LLM.chat: unknown argument 'xyz'$"):
        refuse_arguments("LLM.chat", {"xyz": 1}, ("messages",))


def test_parameters_are_changed_as_vllms_are():
    params = SamplingParams(max_tokens=8, stop="a")
    params.max_tokens = 5
    params.stop = ["x", "y"]
    assert params == SamplingParams(max_tokens=5, stop=("x", "y"))
    with pytest.raises(ConfigError, match="max_tokens: expected an integer of at least 1, got 0"):
        params.max_tokens = 0
    with pytest.raises(ConfigError, match="min_tokens: expected at most max_tokens 5, got 6"):
        params.min_tokens = 6
    with pytest.raises(ConfigError, match="unknown argument 'max_token'; did you mean 'max_tokens'"):
        params.max_token = 5
    assert params == SamplingParams(max_tokens=5, stop=("x", "y")), "a refused change changes nothing"


@pytest.mark.parametrize(
    "copied", [SamplingParams.clone, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))]
)
def test_a_copy_is_equal_and_shares_nothing(copied):
    params = SamplingParams(max_tokens=8, stop="a", logit_bias={1: 2.0})
    other = copied(params)
    assert other == params and hash(other) == hash(params)
    other.max_tokens, other.logit_bias[2] = 3, 1.0
    assert params == SamplingParams(max_tokens=8, stop="a", logit_bias={1: 2.0})
