"""A new weight scheme is one folder and one line: w3a16 (tests/support/w3a16) works wherever one is named."""

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qrt.assets import model_path
from qrt.errors import UnsupportedError
from qrt.kernels.act_mul.ref import act_mul
from qrt.kernels.linear import explain, kernel, linear, linear_act
from qrt.offline.llm import LLM
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.weight import WEIGHT_SCHEMES, weight_only
from qrt.request.sampling import SamplingParams
from qrt_calibrate import cli, convert
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_eval import sweep
from qrt_eval.cli import main
from qrt_eval.inputs import shapes
from qrt_eval.speed.kernels import layer
from qrt_eval.speed.kernels.linear import heads
from random_weights import random_weight, reference, relative
from w3a16.scheme import W3A16

LINE = "w3a16.scheme:W3A16"
ROOT = Path(__file__).parents[1]
OVER_THE_REGISTRY = [
    *("tests/kernels/linear/test_linear_choose.py", "tests/calibrate/recipe/test_groups.py"),
    *("tests/calibrate/estimate/test_bits.py", "tests/eval/speed/kernels/test_kernels.py"),
    "tests/model/test_random_model.py",
]
TEXT = "The Python interpreter reads a file, compiles it and runs the code. " * 8


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Add the line to the registry."""
    monkeypatch.setitem(WEIGHT_SCHEMES._entries, "w3a16", LINE)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The bundled model in 3 bits, as qrt-calibrate makes it."""
    out = tmp_path_factory.mktemp("w3a16") / "tiny-w3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WEIGHT_SCHEMES._entries, "w3a16", LINE)
        text = out.parent / "text.txt"
        text.write_text(TEXT * 40)
        words = ["--model", "tiny", "--out", str(out), "--bits", "3", "--calib", str(text)]
        assert cli.main([*words, "--n-samples", "8", "--seqlen", "128", "--eval-samples", "2"]) == 0
    return out


def loss(model):
    llm = LLM(str(model), dtype="float32", max_model_len=512)
    return -float(llm.score([llm.tokenizer.encode(argparse.__doc__[:1500])])[0].mean())


def test_calibration_writes_three_bits_as_compressed_tensors(calibrated):
    config = json.loads((calibrated / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["format"] == "pack-quantized" and group["weights"]["num_bits"] == 3
    assert group.get("input_activations") is None
    assert (config["qrt"]["scheme"], config["qrt"]["method"]) == ("w3a16", "awq-gptq")
    scheme, weight = open_checkpoint(calibrated).linear("model.layers.0.mlp.down_proj")
    assert (scheme, weight.bits, weight.values.max()) == ("w3a16", 3, 7) and weight.zero is not None


def test_the_model_computes_what_its_dequantized_weights_do(calibrated):
    """transformers runs the bundled model with the checkpoint's weights put into it, in fp32."""
    written = open_checkpoint(calibrated)
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32)
    state = {name: written.tensor(name).float() for name in written.names() if name in model.state_dict()}
    for name in model.state_dict():
        if name.endswith("_proj.weight"):
            state[name] = written.linear(name.removesuffix(".weight"))[1].dequantize()
    model.load_state_dict(state, strict=False)
    llm = LLM(str(calibrated), dtype="float32", max_model_len=512)
    assert llm.engine.model.scheme == "w3a16"
    ids = llm.tokenizer.encode(TEXT)[:200]
    wanted = (
        model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    )
    torch.testing.assert_close(llm.score([ids])[0], wanted[:, 0].detach(), rtol=2e-3, atol=2e-3)


def test_three_bits_lose_more_than_none_and_less_than_all(calibrated):
    """ln 4096 is 8.3."""
    exact, rounded = loss("tiny"), loss(calibrated)
    assert exact < rounded < 5


def test_generation_does_not_depend_on_the_batch(calibrated):
    llm = LLM(str(calibrated), kv="int8", dtype="float32", max_model_len=256)
    params = SamplingParams(max_tokens=8, temperature=0)
    prompts = ["The list", "import sys", "A class is"]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone and all(len(ids) == 8 for ids in together)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("multiply", [linear, kernel.linear], ids=["cpu", "gpu"])
def test_product_equals_the_dequantized_weight(multiply, symmetric, dtype, bound):
    """Without a kernel its definition multiplies on a GPU too."""
    weight = random_weight(48, 96, 3, 32, symmetric=symmetric, dtype=dtype)
    x, bias = torch.randn(5, 96).to(dtype), torch.randn(48).to(dtype)
    tensors = W3A16.prepare(weight, torch.device("cpu"), dtype)
    assert relative(multiply(x, tensors, bias, "w3a16"), reference(x, weight, bias)) < bound
    got = linear_act(x, tensors, bias, "w3a16", "silu")
    assert torch.equal(got, act_mul(linear(x, tensors, bias, "w3a16"), "silu"))


def test_a_gpu_says_once_that_no_kernel_multiplies_it(caplog):
    weight = W3A16.prepare(random_weight(48, 96, 3, 32), torch.device("cpu"), torch.float32)
    kernel._say.cache_clear()
    with caplog.at_level(logging.WARNING):
        for tokens in (1, 2, 3):
            kernel.linear(torch.randn(tokens, 96), weight, None, "w3a16")
    (said,) = caplog.messages
    assert "w3a16" in said and "definition" in said
    assert "linear_ref" in explain(torch.randn(1, 96), weight, "w3a16")


def test_commands_offer_it():
    """Help is made when a command starts, so it knows a scheme that has its line by then."""
    command = "import w3a16.line; from qrt_calibrate.cli import main; main(['--help'])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", command]
    out = " ".join(subprocess.run(run, capture_output=True, text=True, env=environment).stdout.split())
    for words in ("{3,4,8}", "awq-gptq for w3a16", "store zero points (default for w4a16, w4a8, w3a16)"):
        assert words in out
    assert weight_only()[3] == "w3a16" and recipe_of({"bits": 3}).method == "awq-gptq"
    assert sweep._schemes("--weights", ["16", "3", "w3a16"]) == ("fp16", "w3a16")
    assert {("w3a16", "int8"), ("w3a16", "int4")} <= set(layer.pairs())
    assert heads() == {"fp16", "w8a16", "w8a8"}


def test_an_int8_head_goes_with_it():
    recipe = recipe_of({"bits": 3, "head_bits": 8})
    assert (recipe.head.scheme, recipe.head.spec.bits) == ("w8a16", 8)


def test_kernels_are_timed_and_explained(monkeypatch, capsys, tmp_path):
    config = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1e4,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    }  # fmt: skip
    monkeypatch.setitem(shapes.SHAPES, "small", ("LlamaForCausalLM", config))
    out = tmp_path / "kernels.json"
    words = "kernels --shape small --op layer chain linear --tokens 1 --decode 1x32 --json"
    assert main([*words.split(), str(out)]) == 0
    whats = {row["what"] for row in json.loads(out.read_text())["kernels"]}
    assert {"w3a16", "w3a16 qkv", "w3a16 sum", "w3a16, KV int8"} <= whats
    capsys.readouterr()
    assert main(["kernels", "--shape", "small", "--explain"]) == 0
    assert "small in w3a16" in capsys.readouterr().out


def test_formats_without_three_bits_refuse_it(calibrated):
    scheme, weight = open_checkpoint(calibrated).linear("model.layers.0.mlp.up_proj")
    for target in ("gptq", "awq"):
        weight.scale.data = weight.scale.half().to(weight.scale.dtype)
        with pytest.raises(UnsupportedError, match="w3a16"):
            convert.encode(target, "up_proj", scheme, weight, torch.bfloat16)


def test_evaluators_load_it(calibrated, tmp_path):
    """With the line in the registry before anything reads it, as in the source."""
    out = tmp_path / "ppl.json"
    words = [
        "ppl",
        "pydoc",
        "--model",
        str(calibrated),
        "--seqlen",
        "128",
        "--limit",
        "2",
        "--json",
        str(out),
    ]
    command = f"""
import sys
from qrt.quant.weight import WEIGHT_SCHEMES
WEIGHT_SCHEMES._entries["w3a16"] = {LINE!r}
from qrt_eval.cli import main
sys.exit(main({[*words, "--json", str(out)]!r}))
"""  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, env=environment)
    assert json.loads(out.read_text())["weights"] == "w3a16"


@pytest.mark.slow
def test_the_tests_over_the_registry_take_it():
    command = [sys.executable, "-m", "pytest", "-p", "w3a16.line", "-p", "no:cacheprovider", "-n", "0"]
    known = "w3a16 or a_budget_keeps or impossible_budget or dry_run_says or every_product_and_scheme"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "-k", known, *OVER_THE_REGISTRY], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_a_name_without_a_line_is_refused(monkeypatch, calibrated):
    monkeypatch.delitem(WEIGHT_SCHEMES._entries, "w3a16")
    monkeypatch.delitem(WEIGHT_SCHEMES._loaded, "w3a16", raising=False)
    with pytest.raises(UnsupportedError, match="pack-quantized with 3-bit"):
        LLM(str(calibrated))
    with pytest.raises(UnsupportedError, match="w3a16"):
        WEIGHT_SCHEMES["w3a16"]
