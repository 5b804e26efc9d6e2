"""A mixture of experts: each sees every token, routers follow the folds, transformers loads the result."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hand_steps import Requests
from live_bytes import Peak, live_bytes
from qrt.arch import Arch
from qrt.arch.read import read_arch
from qrt.errors import QrtError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.compressed_tensors import target_of
from qrt_calibrate import cli
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import plan
from qrt_calibrate.model.executor import LayerExecutor, read_layer
from qrt_calibrate.model.streams import Streams
from qrt_calibrate.pipeline import calibrate as calibrate_model
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.rounding import each, factor, gptq
from qrt_calibrate.rounding.fold import Pair
from qrt_calibrate.rounding.observe import Moments
from qrt_calibrate.steps import correct, experts
from qrt_calibrate.steps.figures import output_error
from qrt_calibrate.steps.layer import quantize_layer
from truth import ours, relative

CPU = torch.device("cpu")
QWEN = {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
SIZES = {
    "MixtralForCausalLM": {"num_local_experts": 4, "router_jitter_noise": 0.1},
    "Qwen2MoeForCausalLM": {**QWEN, "shared_expert_intermediate_size": 128},
    "Qwen3MoeForCausalLM": QWEN,
}
CUT = ["--group-size", "64", "--n-samples", "16", "--seqlen", "64", "--eval-samples", "8"]
ENTRIES = {"bits": 4, "group_size": 64, "method": "awq-gptq"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if "Qwen2" in name else [pytest.mark.exhaustive]) for name in SIZES],
)
def mixture(request, make_checkpoint):
    """bf16; one input channel of the experts is an outlier, so that scales are worth folding."""
    folder = make_checkpoint(request.param, num_experts_per_tok=2, **SIZES[request.param])
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            tensor[5] *= 32
        elif (".mlp." in name or ".block_sparse_moe." in name) and tensor.shape[-1] == 128:
            tensor[:, 5] /= 32
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def calibrate(mixture, calib):
    """calibrate(out, *flags) -> the exit code."""

    def run(out, *flags):
        words = ["--model", mixture, "--calib", calib, "--out", out, *CUT, *flags]
        return cli.main([str(word) for word in words])

    return run


def name_of(folder):
    return open_checkpoint(folder).config["architectures"][0]


def arch_of(folder):
    return read_arch(open_checkpoint(folder).config, folder)


def shares(folder):
    """Whether it has an expert that all tokens go through."""
    return "Qwen2" in name_of(folder)


@pytest.fixture(scope="module")
def best(calibrate, tmp_path_factory):
    """The mixture at four bits by the default method."""
    out = tmp_path_factory.mktemp("best") / "out"
    assert calibrate(out, "--bits", "4") == 0
    return out


def windows(count, length=40):
    return torch.randint(0, 512, (count, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_hidden_states_and_gradients_are_those_of_transformers(mixture):
    checkpoint, ids = open_checkpoint(mixture), windows(3)
    executor = LayerExecutor(checkpoint, arch_of(mixture), 40, CPU)
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    wanted = model(ids, output_hidden_states=True).hidden_states
    hidden = executor.embed(ids)
    layer = executor.load(0, read_layer(checkpoint, "model.layers.0"))
    torch.testing.assert_close(executor.run(0, layer, hidden), wanted[1], rtol=1e-4, atol=1e-5)
    pull = torch.randn(hidden.shape)
    with torch.enable_grad():
        leaf = hidden.clone().requires_grad_()
        model.model.norm = torch.nn.Identity()
        model.model.layers = model.model.layers[:1]
        (model.model(inputs_embeds=leaf).last_hidden_state * pull).sum().backward()
    torch.testing.assert_close(executor.backward(0, layer, hidden, pull), leaf.grad, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_folds_reach_every_expert_and_the_router(mixture):
    """Powers of two: the layer computes the same to the last bit."""
    checkpoint, arch = open_checkpoint(mixture), arch_of(mixture)
    executor = LayerExecutor(checkpoint, arch, 40, CPU)
    layer, hidden = executor.load(0, read_layer(checkpoint, "model.layers.0")), executor.embed(windows(2))
    before, router = executor.run(0, layer, hidden), layer.get_submodule(arch.routers[0]).weight.clone()
    for number, smooth in enumerate(arch.smooth):
        channels = layer.get_submodule(smooth.source).weight.shape[0]
        generator = torch.Generator().manual_seed(number)
        Pair(layer, smooth, 64).fold(
            torch.exp2(torch.randint(-4, 5, (channels,), generator=generator).float())
        )
    assert torch.equal(executor.run(0, layer, hidden), before)
    assert not torch.equal(layer.get_submodule(arch.routers[0]).weight, router)
    assert len(arch.smooth) == 3 + 4 + shares(mixture)


def test_a_router_that_is_left_out_is_found(mixture, tmp_path, monkeypatch):
    monkeypatch.setattr(Arch, "routers", ())
    job = plan(open_checkpoint(mixture), recipe_of(ENTRIES), CPU)
    executor = LayerExecutor(job.checkpoint, job.arch, 40, CPU)
    streams = Streams(executor.embed(windows(8)), 8, [CPU], tmp_path)
    tensors = read_layer(job.checkpoint, "model.layers.1")
    with pytest.raises(QrtError, match=r"model\.layers\.1: folding scales from post_attention_layernorm"):
        quantize_layer(job, 1, tensors, executor, streams)


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("devices", [[CPU], [CPU, CPU]])
def test_moments_are_of_the_tokens_that_count(devices, every, mixture, tmp_path, monkeypatch):
    """Against transformers' stacked experts; 8 bits before move the inner inputs by about a hundredth."""
    entries = {**ENTRIES, "bits": 8, "method": "gptq", "ignore": ["self_attn.*"]}
    entries["moe_calibrate_all_experts"] = every
    job = plan(open_checkpoint(mixture), recipe_of(entries), *devices)
    three = 3 * 3 * 4 * job.arch.experts.width**2  # of four experts
    monkeypatch.setattr(experts, "EXPERT_BYTES", three)
    monkeypatch.setattr(experts, "LEAST_TOKENS", 1)
    executor, ids = LayerExecutor(job.checkpoint, job.arch, 40, CPU), windows(8)
    streams = Streams(executor.embed(ids), 8, devices, tmp_path)
    found, correction = [], Moments.take_correction

    def keep(self, *arguments):
        found.append(copy.deepcopy(self))
        return correction(self, *arguments)

    monkeypatch.setattr(Moments, "take_correction", keep)
    result = quantize_layer(job, 0, read_layer(job.checkpoint, "model.layers.0"), executor, streams)
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    first, inputs = model.model.layers[0], []
    for module in (first.post_attention_layernorm, first.mlp.experts):
        module.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0].flatten(0, -2)))
    with torch.no_grad():
        model(ids)
    stream, x = (own.double() for own in inputs)
    felt = 1 / (stream.square().mean(-1, keepdim=True) + job.arch.norm.eps)
    chosen = (x @ first.mlp.gate.weight.double().T).topk(2).indices
    sent = [slice(None) if every else (chosen == number).any(1) for number in range(4)]
    wanted = [x[own].T @ x[own] / len(x[own]) for own in (sent[:1] if every else sent)]
    for gate_up, own in zip(first.mlp.experts.gate_up_proj.double(), sent, strict=True):
        gate, up = (x[own] @ gate_up.T).chunk(2, -1)
        inner = F.silu(gate) * up
        wanted.append(inner.T @ (inner * felt[own]) / len(inner))
    if shares(mixture):
        shared = first.mlp.shared_expert.double()
        inner = F.silu(shared.gate_proj(x)) * shared.up_proj(x)
        wanted += [x.T @ x / len(x), inner.T @ (inner * felt) / len(x)]
    assert len(x) == 8 * 40
    for moments, hessian in zip(found, wanted, strict=True):
        assert (moments.hessian - hessian).norm() < 0.03 * hessian.norm()
    assert (found[0].hessian - wanted[0]).norm() < 1e-5 * wanted[0].norm()
    counts = chosen.flatten().bincount(minlength=4)
    figures = result.figures
    assert (figures["fewest tokens"], figures["median tokens"]) == (counts.min(), counts.median())
    assert figures.get("experts topped up") == (None if every else 0) and figures["same experts"] == 1


def by_hand(source, folder, dtype="auto"):
    """The source in transformers with the codes' values in place of its weights."""
    model, stored = AutoModelForCausalLM.from_pretrained(source, dtype=dtype), open_checkpoint(folder)
    arch = arch_of(source)
    block, (gate, up, down) = arch.experts.module.rpartition(".")[0], arch.experts.parts

    def value(module):
        return stored.linear(module)[1].dequantize()

    for name, own in model.state_dict().items():
        layer, _, part = name.replace(".mlp.", f".{block}.").rpartition(".")
        if layer.endswith("experts"):
            parts = (gate, up) if part == "gate_up_proj" else (down,)
            for number, expert in enumerate(own):
                expert.copy_(torch.cat([value(f"{layer}.{number}.{each}") for each in parts]))
        else:
            own.copy_(stored.tensor(f"{layer}.{part}") if stored.has(f"{layer}.{part}") else value(layer))
    return model


@torch.no_grad()
def test_the_result_runs_everywhere_and_is_better_than_nearest(best, mixture, calibrate, tmp_path):
    """In one test, because each worker would calibrate for itself."""
    ids = windows(1)
    got = Requests(ours(best)).run([(0, ids[0].tolist())])[0]
    assert relative(got, by_hand(mixture, best, torch.float32)(ids).logits[0]) < 1e-4
    assert calibrate(tmp_path / "nearest", "--bits", "4", "--method", "rtn", "--eval-samples", "8") == 0
    kl, nearest = (
        json.loads((folder / "qrt_report.json").read_text())["cost"]["kl"]
        for folder in (best, tmp_path / "nearest")
    )
    assert kl < 0.5 * nearest
    logits = AutoModelForCausalLM.from_pretrained(best)(windows(2)).logits
    assert torch.equal(logits, by_hand(mixture, best)(windows(2)).logits)
    config = json.loads((best / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{index}.{name}" for index in range(2) for name in arch_of(mixture).routers]
    assert config["ignore"][0] == "lm_head"
    assert all(target_of(router, config["ignore"]) for router in routers)
    assert config["config_groups"]["group_0"]["weights"]["symmetric"] is True
    source, result = (open_checkpoint(folder) for folder in (mixture, best))
    for router in routers:
        original, folded = (stored.tensor(f"{router}.weight") for stored in (source, result))
        scales = (folded / original).median(0).values
        assert torch.equal(original * scales, folded) and torch.equal(scales.log2().round(), scales.log2())
        assert scales[5] > 1


@torch.no_grad()
def test_eight_bits_judged_by_the_block_load_too(calibrate, mixture, tmp_path):
    assert calibrate(tmp_path / "out", "--bits", "8", "--method", "awq") == 0
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(windows(2)).logits
    assert torch.equal(logits, by_hand(mixture, tmp_path / "out")(windows(2)).logits)


@torch.no_grad()
def test_a_quantized_head_loads_beside_experts(calibrate, mixture, tmp_path):
    """The first group, by which transformers reads experts, is theirs."""
    assert calibrate(tmp_path / "out", "--bits", "4", "--method", "rtn", "--head-bits", "8") == 0
    read = open_checkpoint(tmp_path / "out")
    assert read.linear("lm_head")[0] == "w8a16" and not read.has("lm_head.weight")
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(windows(2)).logits
    assert torch.equal(logits, by_hand(mixture, tmp_path / "out")(windows(2)).logits)


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--tune", "3"], "--tune: not for .*ForCausalLM, a mixture of experts"),
        (["--target-bits", "5"], "--target-bits: not for"),
        (["--max-size", "1"], "--max-size: not for"),
        (
            ["--ignore", "experts.3.*"],
            "engines run all experts of model.layers.0 as one; match .*[.]experts[.]",
        ),
    ],
)
def test_what_a_mixture_does_not_have(flags, error, calibrate, tmp_path, capsys):
    assert calibrate(tmp_path / "out", "--dry-run", *flags) == 1
    assert re.search(error, capsys.readouterr().err)


def test_limits_are_said_before_the_work(calibrate, mixture, tmp_path, capsys):
    def said(*flags):
        assert calibrate(tmp_path / "out", "--dry-run", "--method", "rtn", *flags) == 0
        return capsys.readouterr().out

    plain = said()
    routers = ", ".join(arch_of(mixture).routers)
    assert f"routers ({routers}) stay unquantized" in plain
    assert "experts with zero points" not in plain and "loads experts wrong" not in plain
    assert "transformers does not load experts with zero points" in said("--asym")
    assert "loads experts wrong" in said("--ignore", "experts.*")
    assert "loads experts wrong" in said("--ignore", "re:.*[.]1[.].*[.]experts[.].*")
    assert "loads experts wrong" not in said("--ignore", "self_attn.*")
    assert "transformers loads no mixture of experts in w8a8" in said(
        "--scheme", "w8a8", "--group-size", "-1"
    )
    assert "transformers loads no mixture of experts in w4a8; qrt runs it fast" in said("--scheme", "w4a8")
    if shares(mixture):
        assert "loads experts wrong" not in said("--ignore", "shared_expert.*")


@pytest.mark.parametrize("every, held", [(True, 8), (False, 8), (False, 4)])
def test_memory_is_foreseen(every, held, make_checkpoint, calib, tmp_path, monkeypatch, frozen):
    """Within a fifth of all tensors that are alive together, in the middle of a layer or at its end.

    Moments of `held` experts fit; they are gone before those of the others are measured.
    """
    sizes = {"num_experts": 8, "hidden_size": 768, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    source = make_checkpoint("Qwen3MoeForCausalLM", num_experts_per_tok=2, **sizes)
    text = {"calib": str(calib), "n_samples": 2, "seqlen": 32, "eval_samples": 0, "method": "gptq"}
    recipe = recipe_of({**ENTRIES, **text, "moe_calibrate_all_experts": every})
    monkeypatch.setattr(experts, "EXPERT_BYTES", held * 3 * 4 * 768**2)
    peak = Peak()
    monkeypatch.setattr(experts, "_measure", peak.sampled(experts._measure))
    for module, name in ((factor, "_inverse_factor"), (gptq, "round_block")):
        monkeypatch.setattr(module, name, peak.sampled(getattr(module, name)))
    monkeypatch.setattr(each, "round_block", peak.sampled(each.round_block))
    monkeypatch.setattr(correct, "choose_grid", peak.sampled(correct.choose_grid))
    monkeypatch.setattr("qrt_calibrate.steps.figures.output_error", peak.sampled(output_error))
    before = live_bytes()
    foreseen = preflight(plan(open_checkpoint(source), recipe, CPU))
    report = calibrate_model(source, recipe, tmp_path / "out", CPU)
    assert report.stored_bytes == foreseen.output_bytes
    assert (peak.bytes - before) / (foreseen.working_bytes + foreseen.hidden_bytes) == pytest.approx(
        1, abs=0.2
    )
