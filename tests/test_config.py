"""Settings are checked where they are made, and each error names setting, value and remedy."""

import dataclasses

import numpy as np
import pytest
import torch

from qrt.config import EngineConfig, Environment, KernelBackend
from qrt.errors import ConfigError
from qrt.request.sampling import SamplingParams

BAD_SAMPLING = {
    "n": [0, -1, 1.5, True, "2"],
    "temperature": [1e39, -0.1, float("nan"), float("inf"), "hot", None, True],
    "top_p": [0, -1, 1.01, float("nan"), "x"],
    "top_k": [-2, 1.5, "5"],
    "seed": [1.5, "x", 2**63, -(2**63) - 1, True],
    "max_tokens": [0, -1, 2.0],
    "min_tokens": [-1, 17],  # 16 is the default of max_tokens
    "stop": [[""], "", [5], 5],
    "stop_token_ids": [[-1], ["a"], [1.5], 5],
    "allowed_token_ids": [[-1], ["a"], 5],
    "bad_words": ["abc", 5, [""], [("a",)], [(-1,)]],
    "logit_bias": [[1], 5],
    "repetition_penalty": [0, 1e39, "x"],
    "exponential_decay_length_penalty": [5, (1,), (1, 1e39)],
    "logprobs": [-1, 21, 1.5],
    "prompt_logprobs": [-1, 21, "all"],
    "ignore_eos": ["false", None, 2],
    "skip_special_tokens": ["false"],
    "include_stop_str_in_output": ["no"],
}
BAD_ENGINE = {
    "dtype": ["int8", "fp16"],
    "max_model_len": [0, 1.5],
    "max_num_seqs": [0, 1.5],
    "max_num_batched_tokens": [0],
    "gpu_memory_utilization": [0, 1.1, float("nan"), "0.9"],
    "kv": [None, 8],
    "kv_skip_layers": [5, [-1], ["a"]],
    "seed": ["x", None],
    "kv_cache_memory_bytes": [0],
    "enable_prefix_caching": ["false", None],
    "enforce_eager": ["no"],
    "overlap": ["auto"],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, values in BAD_SAMPLING.items() for v in values])
def test_bad_sampling_parameters(name, value):
    with pytest.raises(ConfigError, match=f"{name}: expected .*got "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, values in BAD_ENGINE.items() for v in values])
def test_bad_engine_settings(name, value):
    with pytest.raises(ConfigError, match=f"{name}: expected .*got "):
        EngineConfig("tiny", **{name: value})


def test_the_edges_are_allowed():
    params = SamplingParams(temperature=0, top_p=1, top_k=-1, seed=-(2**63), max_tokens=None, logprobs=20)
    assert (
        params.greedy
        and SamplingParams(temperature=1e-6).greedy
        and not SamplingParams(temperature=0.01).greedy
    )
    assert SamplingParams(stop="end").stop_strings == ("end",) and SamplingParams().stop_strings == ()
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_numbers_of_numpy_and_torch_are_numbers():
    given = SamplingParams(
        temperature=np.float32(0.5), seed=np.int64(7), stop_token_ids=np.array([3, 4]), top_k=torch.tensor(5),
        allowed_token_ids=[np.int64(8), torch.tensor(9)], ignore_eos=np.bool_(True),
        logit_bias={np.int64(8): np.float32(0.5)},
    )  # fmt: skip
    wanted = SamplingParams(temperature=0.5, seed=7, stop_token_ids=[3, 4], top_k=5, allowed_token_ids=[8, 9],
                            ignore_eos=True, logit_bias={8: 0.5})  # fmt: skip
    assert given == wanted and repr(given) == repr(wanted)
    with pytest.raises(ConfigError, match=r"seed: expected an integer.*, got \[7, 8\]"):
        SamplingParams(seed=np.array([7, 8]))


@pytest.mark.parametrize("given", ["half", "float16", torch.float16])
def test_dtypes_by_vllms_and_torchs_names(given):
    assert EngineConfig("tiny", dtype=given) == EngineConfig("tiny", dtype="float16")


def test_settings_are_frozen():
    for settings in (EngineConfig("tiny"), Environment()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            settings.seed = 1


def test_environment(monkeypatch):
    monkeypatch.setenv("QRT_KERNEL_BACKEND", "ref")
    monkeypatch.setenv("QRT_DATA", "/data")
    monkeypatch.delenv("QRT_API_KEY", raising=False)
    for name in (
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_ENDPOINT",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    assert Environment.read() == Environment(KernelBackend.REF, "/data", None)
    for name, value in {
        "HF_HOME": "/models", "HF_ENDPOINT": "https://mirror/", "HF_HUB_OFFLINE": "yes", "HF_TOKEN": "hf_x\n"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    of_hub = {"hub_cache": "/models/hub", "hub_endpoint": "https://mirror", "hub_offline": True}
    assert Environment.read() == Environment(KernelBackend.REF, "/data", None, **of_hub, hub_token="hf_x")
    assert "hf_x" not in repr(Environment.read())
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    assert Environment.read().hub_cache == "/cache"
    monkeypatch.setenv("QRT_KERNEL_BACKEND", "cuda")
    with pytest.raises(
        ConfigError, match="QRT_KERNEL_BACKEND: expected one of auto, ref, triton, got 'cuda'"
    ):
        Environment.read()
