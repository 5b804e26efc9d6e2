"""Converted checkpoints hold the same weights; what a format cannot hold is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from mxfp4_files import publish
from qrt.arch.read import read_arch
from qrt.model.loader import load_model
from qrt.quant.checkpoint import gptq, open_checkpoint
from qrt.quant.checkpoint.compressed_tensors import target_of
from qrt.quant.spec import Granularity, QuantSpec
from qrt_calibrate import cli
from qrt_calibrate.rounding.rtn import round_weight
from tiny_models import quantize_checkpoint, random_checkpoint
from tool_files import quantize_as
from zoo import make


def group(bits, symmetric):
    return QuantSpec(bits, symmetric, Granularity.GROUP, 64)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(bits, symmetric, dtype) -> a quantized checkpoint in compressed-tensors."""
    folder = tmp_path_factory.mktemp("made")

    def make(bits=4, symmetric=False, dtype=torch.float16, architecture="Qwen2ForCausalLM"):
        plain, out = folder / f"plain-{dtype}-{architecture}", folder / f"{bits}-{symmetric}-{dtype}"
        if not plain.exists():
            random_checkpoint(plain, architecture, dtype=dtype, num_hidden_layers=1)
        if not out.exists():
            quantize_checkpoint(plain, out, f"w{bits}a16", group(bits, symmetric))
        return out

    return make


def convert(model, to, out):
    return cli.main(["convert", "--model", str(model), "--to", to, "--out", str(out)])


def weights(folder):
    """Every Linear's weight and bias, and every other tensor."""
    read = open_checkpoint(folder)
    modules = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
    linears = [read.linear(module)[1] for module in modules]
    rest = [read.tensor(name) for name in ("model.norm.weight", "lm_head.weight")]
    return [*(linear.dequantize() for linear in linears), linears[0].bias, *rest]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits, to", [(4, "awq"), (4, "gptq"), (8, "gptq")])
def test_there_and_back(made, tmp_path, bits, to, symmetric):
    source = made(bits, symmetric)
    assert convert(source, to, tmp_path / "there") == 0
    assert open_checkpoint(tmp_path / "there").quantization["quant_method"] == to
    assert convert(tmp_path / "there", "compressed-tensors", tmp_path / "back") == 0
    for folder in ("there", "back"):
        for got, wanted in zip(weights(tmp_path / folder), weights(source), strict=True):
            assert torch.equal(got, wanted), folder


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral"])
def test_mixtures(tmp_path, name):
    """Experts, shared ones and dense layers; routers and shared gates are left out by name."""
    make(name, tmp_path / "plain")
    arch = read_arch(open_checkpoint(tmp_path / "plain").config, "plain")
    layers = [(f"model.layers.{i}", arch.at(i)) for i in range(arch.num_layers)]
    modules = [f"{layer}.{part}" for layer, own in layers for part in own.projections]
    quantize_as("awq-asym", tmp_path / "plain", tmp_path / "awq", tmp_path / "floats", modules, group=32)
    assert convert(tmp_path / "awq", "compressed-tensors", tmp_path / "there") == 0
    assert convert(tmp_path / "there", "awq", tmp_path / "back") == 0
    there, back = open_checkpoint(tmp_path / "there"), open_checkpoint(tmp_path / "back")
    wanted = load_file(tmp_path / "floats/model.safetensors")
    for module in modules:
        for read in (there, back):
            assert torch.equal(read.linear(module)[1].dequantize(), wanted[f"{module}.weight"])
    routers = {f"{layer}.{router}" for layer, own in layers for router in own.routers}
    assert routers and all(target_of(router, there.quantization["ignore"]) for router in routers)
    left = back.quantization["modules_to_not_convert"]
    assert not any(should_convert_module(router, left) for router in routers)
    assert all(should_convert_module(module, left) for module in modules)


def test_experts_in_one_tensor_are_refused(tmp_path, capsys):
    make("gpt_oss", tmp_path / "plain")
    publish(tmp_path / "plain", tmp_path / "published")
    assert convert(tmp_path / "published", "compressed-tensors", tmp_path / "out") == 1
    expected = (
        r"expected a Linear model.layers.0.mlp.experts.0.gate_proj; experts in one tensor are not converted"
    )
    assert expected in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_old_name_of_a_quantization_config_goes(made, tmp_path):
    source, out = tmp_path / "old", tmp_path / "new"
    shutil.copytree(made(), source)
    config = json.loads((source / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(config))
    assert convert(source, "gptq", out) == 0
    written = json.loads((out / "config.json").read_text())
    assert "compression_config" not in written and written["quantization_config"]["quant_method"] == "gptq"


def requantize(folder, module, spec):
    """Put a Linear of a GPTQ checkpoint on another grid; its weight."""
    tensors, config = load_file(folder / "model.safetensors"), folder / "config.json"
    weight = open_checkpoint(folder).linear(module)[1].dequantize()
    weight = round_weight(weight, spec, torch.float16)
    tensors.pop(f"{module}.weight", None)
    tensors |= {f"{module}.{name}": tensor.contiguous() for name, tensor in gptq.encode(weight).items()}
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads(config.read_text())
    settings["quantization_config"]["dynamic"] = {f"+:^{module}$": {"bits": spec.bits}}
    config.write_text(json.dumps(settings))
    return weight


def test_a_quantized_head_of_gptq_is_one_by_name(made, tmp_path):
    """Whatever config.json said of tying: the head is no longer the embedding."""
    folder = tmp_path / "gptq"
    assert convert(made(), "gptq", folder) == 0
    head = requantize(folder, "lm_head", group(4, False))
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["quantization_config"]["lm_head"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert convert(folder, "compressed-tensors", tmp_path / "out") == 0
    out = open_checkpoint(tmp_path / "out")
    assert torch.equal(out.linear("lm_head")[1].dequantize(), head.dequantize())
    assert out.config["tie_word_embeddings"] is False and not out.quantization["ignore"]
    (entry,) = out.quantization["config_groups"].values()
    assert "lm_head" in entry["targets"]


def test_what_would_lose_is_refused(made, tmp_path, capsys):
    plain = random_checkpoint(tmp_path / "plain", "LlamaForCausalLM", num_hidden_layers=1)
    q, down = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    wide = random_checkpoint(tmp_path / "wide", "LlamaForCausalLM", dtype=torch.float16, hidden_size=100)
    odd, mixed = tmp_path / "odd", tmp_path / "mixed"
    quantize_checkpoint(wide, odd, "w4a16", QuantSpec(4, True, Granularity.CHANNEL))
    assert convert(made(), "gptq", mixed) == 0
    requantize(mixed, down, group(8, False))
    unknown = shutil.copytree(made(), tmp_path / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "dtype": "auto"}))
    for model, to, message in (
        (plain, "awq", "not quantized; qrt-calibrate --model quantizes it"),
        (unknown, "gptq", f"{unknown}/config.json: expected dtype float16, bfloat16 or float32, got 'auto'"),
        (made(8), "awq", f"{q}: cannot become awq without loss: it holds 4-bit weights"),
        (made(4, dtype=torch.float32), "gptq", f"{q}: cannot become gptq without loss: fp16, which the"),
        (odd, "gptq", f"{q}: cannot become gptq without loss: a word holds 8 of its 100 inputs"),
        (mixed, "gptq", f"{down}: cannot become gptq without loss: the format holds one grid"),
    ):
        assert convert(model, to, tmp_path / "out") == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("bits", "to"), [(4, "compressed-tensors"), (4, "awq"), (4, "gptq"), (8, "gptq")])
def test_weight_only_leaves_tokens_as_they_are(tmp_path, bits, to, capsys):
    """Groups of w4a8 that are not progressive, as other tools make them, become w4a16, which runs."""
    plain = random_checkpoint(
        tmp_path / "plain", "LlamaForCausalLM", dtype=torch.float16, num_hidden_layers=1
    )
    kinds = {4: ("w4a16", group(4, True)), 8: ("w8a8", QuantSpec(8, True, Granularity.CHANNEL))}
    weights = quantize_checkpoint(plain, tmp_path / "q", *kinds[bits])
    if bits == 4:
        tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
        config = json.loads((tmp_path / "q/config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = tokens
        (tmp_path / "q/config.json").write_text(json.dumps(config))
    if to != "compressed-tensors":
        assert convert(tmp_path / "q", to, tmp_path / "out") == 1
        told = f"cannot become {to} without loss: the format has no w{bits}a8; --weight-only leaves tokens"
        assert told in capsys.readouterr().err
    assert cli.main(["convert", "--model", str(tmp_path / "q"), "--to", to, "--weight-only",
                     "--out", str(tmp_path / "out")]) == 0  # fmt: skip
    read = open_checkpoint(tmp_path / "out")
    for module, weight in weights.items():
        scheme, got = read.linear(module)
        assert scheme == f"w{bits}a16" and torch.equal(got.dequantize(), weight.dequantize())
    cpu, dtype = torch.device("cpu"), torch.float16
    assert set(load_model(tmp_path / "out", device=cpu, dtype=dtype).schemes) == {f"w{bits}a16"}
