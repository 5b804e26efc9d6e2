"""qrt.calibrate and qrt.quantize: paths and models in memory."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qrt
from qrt.errors import ConfigError
from qrt.quant.checkpoint import open_checkpoint


def test_a_model_in_memory_calibrates_as_its_folder_does(llama, calib, tmp_path):
    settings = {"bits": 4, "calib": str(calib), "n_samples": 4, "seqlen": 64, "eval_samples": 1}
    report = qrt.calibrate(llama, tmp_path / "path", device="cpu", **settings)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    qrt.calibrate(model, tmp_path / "memory", tokenizer=tokenizer, device="cpu", **settings)
    assert report.cost.kl > 0
    assert f"kl={report.cost.kl!r}" in repr(report) and len(repr(report)) < 1000, "what a notebook shows"
    shards = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("path", "memory")]
    assert shards[0] == shards[1]
    with pytest.raises(ConfigError, match="unknown key 'bit'; did you mean 'bits'"):
        qrt.calibrate(llama, tmp_path / "other", bit=4)


def test_what_is_not_transformers_own_is_named(llama):
    model = AutoModelForCausalLM.from_pretrained(llama)
    with pytest.raises(ConfigError, match="model: expected one of transformers', got Linear"):
        qrt.quantize(torch.nn.Linear(2, 2), bits=4)
    with pytest.raises(ConfigError, match="tokenizer: expected one of transformers', got str"):
        qrt.quantize(model, str(llama), bits=4)
    with pytest.raises(ConfigError, match="tokenizer: expected the model's, .*, got none"):
        qrt.quantize(model, bits=4, method="awq")
    with pytest.raises(ConfigError, match="tokenizer: expected the model's, .*, got none"):
        qrt.quantize(model, bits=4, eval_samples=1)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    with pytest.raises(ConfigError, match=f"tokenizer: expected a folder, got {type(tokenizer).__name__}"):
        qrt.LLM(qrt.quantize(model, bits=4), tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="model: expected a folder, got LlamaForCausalLM; qrt.quantize"):
        qrt.LLM(model)


def test_quantize_gives_what_the_engine_loads(llama):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    folder = qrt.quantize(model, tokenizer, bits=8)
    assert open_checkpoint(folder).linear("model.layers.0.mlp.up_proj")[0] == "w8a16"
    llm = qrt.LLM(folder, dtype="float32", max_model_len=64)
    ids = tokenizer("some text")["input_ids"]
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    wanted = wanted[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(llm.score([ids])[0], wanted, rtol=2e-3, atol=2e-3)
