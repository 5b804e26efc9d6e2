"""Names of other engines: what asks for something is refused with a remedy, what does not is taken."""

import numpy as np
import pytest

from qrt.config import SamplingParams
from qrt.errors import ConfigError, UnsupportedError
from qrt.peer_fields import FIELDS, refuse_arguments
from qrt.peers import SETTINGS, is_so_anyway

# vLLM's SamplingParams with the defaults of vLLM 0.8 to 0.11, those left out that qrt has too
VLLM_DEFAULTS = {
    "prompt_logprob_token_ids": None, "prompt_logprob_start": None, "logprob_token_ids": None,
    "flat_logprobs": False, "detokenize": True, "spaces_between_special_tokens": True,
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
    "web_search_options": {}, "verbosity": "low", "n_probs": 5, "return_tokens": True, "detokenize": False,
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
def test_what_asks_for_something_is_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=f"^{name}: \\w+"):
        SamplingParams(**{name: ASKING[name]})


@pytest.mark.parametrize("fields", [VLLM_DEFAULTS, ASKING_NOTHING], ids=["vllm", "others"])
def test_what_asks_for_nothing_is_taken(fields):
    for name, value in fields.items():
        assert SamplingParams(top_k=5, **{name: value}) == SamplingParams(top_k=5), name
    assert SamplingParams(**fields) == SamplingParams()


def test_some_fields_ask_only_together_with_another():
    for lead, value, follower in (
        ("presence_penalty", 1, "repeat_last_n"),
        ("repetition_penalty", 1.1, "repeat_last_n"),
    ):
        with pytest.raises(UnsupportedError, match=f"^{follower}: "):
            SamplingParams(**{lead: value, follower: 64})
    with pytest.raises(UnsupportedError, match="dry_base: .*; dry_multiplier: "):
        SamplingParams(dry_multiplier=0.8, dry_base=2)
    assert all(lead in FIELDS for entry in FIELDS.values() for lead in entry.only_with)
    assert not any(entry.only_with for entry in SETTINGS.values()), "settings are judged one by one"


def test_arrays_ask_for_something():
    for array in (np.zeros((2, 3)), [np.zeros(3)]):
        with pytest.raises(UnsupportedError, match="^prompt_embeds: "):
            SamplingParams(prompt_embeds=array)


def test_every_refusal_says_what_to_do_instead():
    """A name that some value can be refused for has a remedy."""
    for name, entry in {**FIELDS, **SETTINGS}.items():
        assert entry.remedy or entry.asks_nothing(object()) or is_so_anyway(name, {}), name


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
    with pytest.raises(ConfigError, match="max_tokens: got 0"):
        params.max_tokens = 0
    with pytest.raises(ConfigError, match="min_tokens: got 6, wanted at most max_tokens 5"):
        params.min_tokens = 6
    with pytest.raises(ConfigError, match="unknown argument 'max_token'; did you mean 'max_tokens'"):
        params.max_token = 5
    assert params == SamplingParams(max_tokens=5, stop=("x", "y")), "a refused change changes nothing"
