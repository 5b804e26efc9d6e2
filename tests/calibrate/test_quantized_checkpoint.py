"""What a calibration writes loads in transformers, computes what was reported, and is the same every time."""

from dataclasses import replace

import pytest
import torch
from outliers import Profile, make_hard
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from qrt.errors import CheckpointError
from qrt.quant import progressive
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.spec import Granularity, QuantSpec
from qrt.text.tokenizer import Tokenizer
from qrt_calibrate import cli
from qrt_calibrate.pipeline import calibrate
from qrt_calibrate.recipe.recipe import Recipe
from qrt_calibrate.text.text import cut_windows
from tiny_models import LLAMA3_ROPE, altered

CASES = [
    ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    ("MistralForCausalLM", {"sliding_window": 32}),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", {}),
    ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "head_dim": 32, "pad_token_id": 0}),
    ("SeedOssForCausalLM", {}),
    ("Ernie4_5ForCausalLM", {"use_bias": False}),
    ("MinistralForCausalLM", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
]
CHANNEL8 = QuantSpec(8, symmetric=True, granularity=Granularity.CHANNEL)
W4 = QuantSpec(4, symmetric=False, granularity=Granularity.GROUP, group_size=64)
CPU = torch.device("cpu")


def recipe(calib, **changes):
    return Recipe(
        **{
            "scheme": "w4a16",
            "spec": W4,
            "method": "awq-gptq",
            "calib": str(calib),
            "n_samples": 8,
            "seqlen": 64,
            **changes,
        }
    )


@pytest.fixture
def hard(llama, tmp_path):
    """The Llama with outliers that rounding cannot bear, so that every pair gets scales."""
    return make_hard(llama, tmp_path / "hard", Profile(64.0, 12, heads=True))


def by_hand(source, out):
    """The source's model with the weights of `out` dequantized into it: what `out` must compute."""
    model, written = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), open_checkpoint(out)
    state = {name: written.tensor(name) for name in written.names() if name in model.state_dict()}
    for name in model.state_dict():
        if name.endswith("_proj.weight"):
            state[name] = written.linear(name.removesuffix(".weight"))[1].dequantize()
    model.load_state_dict(state, strict=False)
    return model


@torch.no_grad()
@pytest.mark.parametrize("architecture, config", CASES)
def test_transformers_computes_what_was_written(architecture, config, make_checkpoint, calib, tmp_path):
    source = make_checkpoint(architecture, dtype=torch.float32, **config)
    report = calibrate(str(source), recipe(calib, n_samples=32), tmp_path / "out", CPU)
    ids = torch.randint(0, 256, (2, 50), generator=torch.Generator().manual_seed(1))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    wanted = by_hand(source, tmp_path / "out")(ids).logits
    torch.testing.assert_close(loaded, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    exact = AutoModelForCausalLM.from_pretrained(source)(ids).logits
    assert float((loaded - exact).norm() / exact.norm()) < 0.5  # 4 bits of noise weights, not garbage
    for layer in report.layers:
        assert layer.figures["output error"] < layer.figures["output error, rtn"]


@torch.no_grad()
def test_the_reported_error_is_that_of_the_written_weights(hard, calib, tmp_path):
    report = calibrate(str(hard), recipe(calib, eval_samples=0), tmp_path / "out", CPU)
    exact = AutoModelForCausalLM.from_pretrained(hard, dtype=torch.float32).model
    quantized = by_hand(hard, tmp_path / "out").model
    windows = cut_windows([calib.read_text()], Tokenizer(hard), 8, 64, seed=0)
    hidden = F.embedding(windows, exact.embed_tokens.weight)
    for index, layer in enumerate(report.layers):
        rope = exact.rotary_emb(hidden, torch.arange(64)[None])
        wanted = exact.layers[index](hidden, position_embeddings=rope)
        got = quantized.layers[index](hidden, position_embeddings=rope)
        root = (wanted.square().mean(-1, keepdim=True) + exact.config.rms_norm_eps).rsqrt()
        error = float(((got - wanted) * root).norm() / ((wanted - hidden) * root).norm())
        assert layer.figures["output error"] == pytest.approx(error, rel=1e-3)
        assert error < 0.5 * layer.figures["output error, rtn"]
        norms = [model.layers[index].post_attention_layernorm.weight for model in (exact, quantized)]
        assert not torch.equal(*norms)  # folded
        hidden = got  # the next layer was calibrated on the outputs of this one, quantized


@pytest.mark.gpu
def test_the_gpu_calibrates_as_well_as_the_cpu(hard, calib, tmp_path):
    reports = [
        calibrate(str(hard), recipe(calib), tmp_path / name, torch.device(name)) for name in ("cpu", "cuda")
    ]
    for cpu, gpu in zip(*(report.layers for report in reports), strict=True):
        for title, figure in cpu.figures.items():
            assert gpu.figures[title] == pytest.approx(figure, rel=0.05), title


def test_int8_is_almost_exact(llama, calib, tmp_path):
    spec = QuantSpec(8, symmetric=True, granularity=Granularity.GROUP, group_size=128)
    report = calibrate(str(llama), recipe(calib, scheme="w8a16", spec=spec), tmp_path / "out", CPU)
    assert report.bits_per_weight == pytest.approx(8 + 16 / 128, rel=0.01)
    assert all(layer.figures["output error"] < 0.02 for layer in report.layers)


@torch.no_grad()
def test_the_reported_cost_is_that_of_what_transformers_loads(hard, calib, tmp_path):
    """KL, perplexities and agreement from the definition, on windows that did not calibrate."""
    for scheme, spec, method in (
        ("w4a16", W4, "awq-gptq"),
        ("w8a8", CHANNEL8, "smoothquant-gptq"),
        ("w4a8", replace(W4, progressive=True), "awq-yaqa"),
    ):
        plan = recipe(calib, scheme=scheme, spec=spec, method=method, eval_samples=2)
        cost = calibrate(str(hard), plan, tmp_path / scheme, CPU).cost
        windows = cut_windows([calib.read_text()], Tokenizer(hard), 10, 64, seed=0)[8:]
        models = (hard, tmp_path / scheme)
        p, q = (
            AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32)(windows)
            .logits[:, :-1]
            .log_softmax(-1)
            for m in models
        )
        rel = 0.02 if scheme == "w4a16" else 0.3  # transformers divides activations by absmax / 127.5
        assert cost.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=rel)
        for ppl, logits in ((cost.exact_ppl, p), (cost.ppl, q)):
            loss = F.nll_loss(logits.flatten(0, 1), windows[:, 1:].flatten())
            assert ppl == pytest.approx(float(loss.exp()), rel=1e-3 if scheme == "w4a16" else 3e-2)
        assert cost.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=0.05)


@pytest.mark.parametrize(("symmetric", "dtype"), [(True, torch.float16), (False, torch.bfloat16)])
def test_w4a8_is_written_in_steps_of_channels(symmetric, dtype, make_checkpoint, calib, tmp_path):
    """Behind folds of any scales too, which divide the rows of v and up: there they stay powers of two."""
    plain = make_checkpoint("LlamaForCausalLM", dtype=dtype)
    source = make_hard(plain, tmp_path / "hard", Profile(64.0, 12, heads=True))
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 32, progressive=True)
    plan = recipe(calib, scheme="w4a8", spec=spec, method="awq-yaqa", exact_folds=False, eval_samples=0)
    report = calibrate(str(source), plan, tmp_path / "out", CPU)
    written = open_checkpoint(tmp_path / "out")
    assert all(layer.figures["largest scale"] > 1 for layer in report.layers)
    for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        scheme, weight = written.linear(f"model.layers.1.{name}")
        assert scheme == "w4a8" and progressive.split(weight.scale, weight.zero).steps.min() >= 1
    for layer in report.layers:
        assert layer.figures["output error"] < 0.5 * layer.figures["output error, rtn"]


@torch.no_grad()
def test_nearly_dead_input_keeps_weights_finite(make_checkpoint, calib, tmp_path):
    """What earlier layers lack could be made good for by some 1e11 times an input of 1e-13: NaN in fp16."""

    def change(tensors):
        tensors["model.layers.1.post_attention_layernorm.weight"] *= 1e-6

    made = make_checkpoint("MistralForCausalLM", dtype=torch.float16)
    source = altered(made, tmp_path / "dead", change)
    report = calibrate(str(source), recipe(calib), tmp_path / "out", CPU)
    figures = report.layers[1].figures
    assert figures["output error"] < figures["output error, rtn"]
    weight = open_checkpoint(tmp_path / "out").linear("model.layers.1.mlp.down_proj")[1]
    assert weight.dequantize().half().isfinite().all()


def test_a_perplexity_beyond_floats_is_refused_by_name(llama, calib, tmp_path):
    """And no traceback: a loss of a thousand nats is a model that does not run."""
    source = altered(llama, tmp_path / "loud", lambda tensors: tensors["model.norm.weight"].mul_(1e4))
    with pytest.raises(CheckpointError, match="a figure of the result is NaN or infinite"):
        calibrate(str(source), recipe(calib, method="rtn"), tmp_path / "out", CPU)


@torch.no_grad()
def test_gptq_beats_rounding_and_scales_beat_gptq_on_outliers(hard, calib, tmp_path):
    kl = {}
    for method in ("rtn", "awq", "gptq", "awq-gptq", "awq-yaqa"):
        # 32 windows: awq-yaqa has 0.89 to 0.94 of awq-gptq's, whatever they are; of 8 windows up to 1.005
        plan = recipe(calib, method=method, n_samples=32)
        kl[method] = calibrate(str(hard), plan, tmp_path / method, CPU).cost.kl
    assert kl["awq-gptq"] < kl["awq"] < kl["rtn"] and kl["awq-gptq"] < kl["gptq"] < kl["rtn"], kl
    assert kl["awq-yaqa"] < kl["awq-gptq"], kl


@torch.no_grad()
def test_ignored_linears_are_untouched(llama, calib, tmp_path):
    calibrate(str(llama), recipe(calib, ignore=("o_proj", "layers.0.mlp.*")), tmp_path / "out", CPU)
    source, out = open_checkpoint(llama), open_checkpoint(tmp_path / "out")
    for name in source.names():
        if "_proj" in name and "o_proj" not in name and "layers.0.mlp" not in name:
            assert name not in out.names(), name
        elif "norm" not in name or "layers.0.post" in name:  # other norms are folded
            assert torch.equal(source.tensor(name), out.tensor(name)), name


def test_figures_missing_in_the_first_layer_are_shown(llama, calib, tmp_path, capsys):
    """Such as that a later one could not be rounded by GPTQ."""
    flags = ["--model", llama, "--calib", calib, "--n-samples", 4, "--seqlen", 64, "--eval-samples", 0]
    words = [*flags, "--method", "gptq", "--ignore", "model.layers.0.*", "--out", tmp_path / "out"]
    assert cli.main([str(word) for word in words]) == 0
    assert "damping" in capsys.readouterr().out
    assert "<th>damping</th>" in (tmp_path / "out" / "qrt_report.html").read_text()
