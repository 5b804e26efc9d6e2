"""Training end to end: its gradients, its text, and what becomes of a checkpoint."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from qrt.assets import model_path
from qrt.errors import ConfigError
from qrt.quant.affine import choose_qparams, dequantize, quantize
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight import WeightData
from qrt_calibrate import cli
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import plan
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.steps import tune
from qrt_calibrate.steps.advance import Windows
from qrt_calibrate.steps.tune import TunedNorm, TunedWeight, check_room, tune_bytes

CPU = torch.device("cpu")
FLAGS = ["--bits", "4", "--group-size", "64", "--n-samples", "4", "--seqlen", "64", "--eval-samples", "4"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("BATCH", 4), ("DRAWN", 8), ("WINDOW", 48), ("MICRO_TOKENS", 100), ("WARMUP", 2)):
        monkeypatch.setattr(tune, name, value)


def quantized(symmetric, dtype=torch.float32):
    torch.manual_seed(0)
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 16)
    weight = torch.randn(6, 32)
    scale, zero = choose_qparams(weight, spec, dtype)
    return WeightData(quantize(weight, scale, zero, spec), scale, zero, bits=4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_step_is_that_of_adam_on_codes_that_are_not_rounded(symmetric):
    """torch's own Adam, gradients by torch, on (place - zero) * scale * gain."""
    data = quantized(symmetric)
    tuned = TunedWeight(data, torch.float32, CPU)
    place = data.values.float().requires_grad_()
    gain = torch.ones_like(data.scale).requires_grad_()
    rates = [{"params": [place], "lr": tune.CODE_RATE}, {"params": [gain], "lr": tune.SCALE_RATE}]
    adam = torch.optim.Adam(rates, betas=tune.BETAS, eps=1e-12)
    for step in (1, 2, 3):
        gradient = torch.randn(6, 32)
        weight = dequantize(place, data.scale * gain, data.zero, 4)
        adam.zero_grad()
        (weight * gradient).sum().backward()
        adam.step()
        tuned.follow(gradient, step, 1.0)
        with torch.no_grad():
            place.clamp_(0, 15)
        torch.testing.assert_close(tuned.gain, gain.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tuned.place, place.detach(), rtol=1e-5, atol=1e-5)


def test_a_norm_s_step_is_that_of_adam():
    weight = torch.randn(32).to(torch.bfloat16)
    tuned, gain = TunedNorm(weight, torch.float32, CPU), torch.ones(32).requires_grad_()
    adam = torch.optim.Adam([gain], lr=tune.SCALE_RATE, betas=tune.BETAS, eps=1e-12)
    for step in (1, 2, 3):
        gradient = torch.randn(32)
        adam.zero_grad()
        (weight.float() * gain * gradient).sum().backward()
        adam.step()
        tuned.follow(gradient, step, 1.0)
        torch.testing.assert_close(tuned.gain, gain.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(tuned.data(), (weight.float() * tuned.gain).to(torch.bfloat16))


def test_what_is_stored_is_on_the_grid():
    tuned = TunedWeight(quantized(False, torch.bfloat16), torch.float32, CPU)
    before = tuned.data()
    assert torch.equal(before.values, quantized(False).values)
    for step in range(1, 61):
        tuned.follow(torch.ones(6, 32), step, 30.0)  # down as far as it goes
    after = tuned.data()
    assert after.values.max() == 0 and after.scale.dtype == torch.bfloat16
    assert torch.equal(after.zero, before.zero) and (after.scale > 0).all()


def test_gradients_are_those_of_the_loss(llama):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).requires_grad_(False)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = (model.get_parameter(name) * 1.1).requires_grad_()
    windows, text = torch.randint(0, 512, (2, 5, 40), generator=torch.Generator().manual_seed(0))
    cost = tune._backward(model, {name: weight}, windows, text, 0.02)  # two windows at a time
    other = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.no_grad():
        other.get_parameter(name).mul_(1.1)
    p, q = (m(windows).logits.log_softmax(-1) for m in (model, other))
    wanted = (p.exp() * (p - q)).sum(-1).mean()
    own = other(text, labels=text).loss  # transformers' mean over all but the first tokens
    (wanted + 0.02 * own).backward()
    assert cost == pytest.approx(wanted.item(), rel=1e-4) and cost > 0
    torch.testing.assert_close(weight.grad, other.get_parameter(name).grad, rtol=1e-3, atol=1e-7)


def test_text_is_drawn_from_the_predictions(llama):
    """What the cache predicts is what a forward over the whole text predicts; frequencies follow it."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    prompts = torch.randint(0, 512, (1, 3), generator=torch.Generator().manual_seed(1)).expand(4000, -1)
    drawn = tune._continued(model, prompts, 5, torch.Generator().manual_seed(0))
    assert drawn.shape == (4000, 5) and torch.equal(drawn[:, :3], prompts)
    with torch.no_grad():
        first = model(prompts[:1]).logits[0, -1].softmax(-1)
        second = model(drawn[:, :4]).logits[:, -1].softmax(-1).mean(0)
    for column, wanted in ((3, first), (4, second)):
        found = torch.bincount(drawn[:, column], minlength=512) / 4000
        likely = wanted > 0.005
        noise = (wanted * (1 - wanted) / 4000).sqrt()
        assert likely.sum() > 5 and ((found - wanted).abs() < 5 * noise)[likely].all()


def test_text_is_cut_from_anywhere_in_the_calibration_text():
    windows = torch.arange(60).view(3, 20)
    text = tune._cut(windows, 4, 16, seed=0)
    cut = torch.cat([next(text) for _ in range(50)])
    assert (cut.diff() == 1).all() and cut.shape == (200, 16)
    assert set(cut[:, 0].tolist()) == {20 * row + at for row in range(3) for at in range(5)}


def test_no_window_is_drawn_twice(llama):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    windows = torch.randint(0, 512, (3, 20), generator=torch.Generator().manual_seed(1))
    text = tune._drawn(model, windows, 16, 3, together=8)
    batches = [next(text), next(text)]
    rows = torch.cat(batches)
    assert rows.shape == (16, 16) and len(rows.unique(dim=0)) == 16
    prompts = {tuple(own) for own in windows.unfold(1, tune.PROMPT, 1).flatten(0, 1).tolist()}
    assert all(tuple(own) in prompts for own in rows[:, : tune.PROMPT].tolist())
    assert torch.equal(next(tune._drawn(model, windows, 16, 3, together=8)), batches[0])


@pytest.mark.parametrize("large", [False, True])
def test_a_gpu_takes_more_windows_of_a_small_model(llama, monkeypatch, large):
    """As many as their keys and values fill `DRAWN_BYTES`; a large model's step is work, not launches."""
    job = plan(open_checkpoint(llama), recipe_of({"bits": 4, "group_size": 64, "tune": 5}), CPU)
    assert tune.windows_a_step(job) == tune.BATCH and tune._drawn_together(job) == tune.DRAWN
    job = replace(job, devices=(torch.device("cuda"),))
    window = tune._cache_bytes(job)
    assert window == 48 * job.config.num_layers * 2 * job.config.num_kv_heads * job.config.head_dim * 4
    monkeypatch.setattr(tune, "DRAWN_BYTES", 100 * window)
    monkeypatch.setattr(tune, "SMALL", 0 if large else 1 << 30)
    assert tune.windows_a_step(job) == (tune.BATCH if large else tune.LAUNCHED_BATCH)
    assert tune._drawn_together(job) == (192 if large else 96)  # 16 bits or 32
    assert tune_bytes(job) > 96 * window


def calibrated(model, calib, out, *flags):
    words = ["--model", model, "--calib", calib, "--out", out, "--method", "gptq", *FLAGS, *flags]
    assert cli.main([str(word) for word in words]) == 0
    return out, json.loads((out / "qrt_report.json").read_text())


@pytest.mark.slow
@pytest.mark.model
def test_a_tuned_checkpoint_is_nearer_to_the_original(calib, tmp_path, monkeypatch):
    """The bundled model on the same drawn windows at every step: those it must learn."""
    monkeypatch.setattr(tune, "CODE_RATE", 0.05)
    monkeypatch.setattr(tune, "SCALE_RATE", 0.005)
    drawn = tune._drawn
    monkeypatch.setattr(tune, "_drawn", lambda *arguments: itertools.repeat(next(drawn(*arguments))[:4]))
    source = model_path("tiny")
    out, report = calibrated(source, calib, tmp_path / "tuned", "--tune", 24)
    tuned, steps = report["tuned"], report["recipe"]["tune"]
    assert tuned["kl_last"] < 0.8 * tuned["kl_first"] and steps == 24
    assert tuned["kl_untuned"] != report["cost"]["kl"]  # measured again
    # transformers reads what was measured
    exact, loaded = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (source, out))
    ids = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(5))
    codes, moved = open_checkpoint(out), False
    with torch.no_grad():
        found = loaded(ids).logits
        for name in plan(open_checkpoint(source), recipe_of({"bits": 4}), CPU).quantized:
            exact.get_parameter(f"{name}.weight").copy_(codes.linear(name)[1].dequantize())
        for name, parameter in exact.named_parameters():
            if "norm" in name:
                moved |= not torch.equal(parameter, codes.tensor(name).float())
                parameter.copy_(codes.tensor(name))
        torch.testing.assert_close(found, exact(ids).logits, rtol=1e-4, atol=1e-4)
    assert moved  # norms too


def test_interrupted_runs_write_the_same_bytes(llama, calib, tmp_path, monkeypatch):
    whole, _ = calibrated(llama, calib, tmp_path / "whole", "--tune", 3)

    def interrupted(where, name):
        def stop(*arguments, **keywords):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(where, name, stop)
            words = ["--model", llama, "--calib", calib, "--out", tmp_path / "out", "--method", "gptq"]
            assert cli.main([str(w) for w in (*words, *FLAGS, "--tune", 3)]) == 130

    interrupted(tune, "_backward")  # layers are written, nothing is trained
    interrupted(Windows, "run_again")  # trained and written
    out, _ = calibrated(llama, calib, tmp_path / "out", "--tune", 3)
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_what_cannot_be_tuned_is_refused(llama, calib, tmp_path, monkeypatch, capsys):
    for entries, reason in (
        ({"method": "rtn"}, "rtn does not read"),
        ({"tune": -1}, "--tune: expected at least 0, got -1"),
    ):
        with pytest.raises(ConfigError, match=reason):
            recipe_of({"bits": 4, "tune": 5, **entries})
    with pytest.raises(ConfigError, match="weight-only schemes, not w8a8"):
        plan(open_checkpoint(llama), recipe_of({"scheme": "w8a8", "tune": 5}), CPU)
    job = plan(open_checkpoint(llama), recipe_of({"bits": 4, "group_size": 64, "tune": 5}), CPU)
    assert preflight(replace(job, recipe=replace(job.recipe, tune=0))).tune_bytes == 0
    assert "tuning, afterwards" in preflight(job).lines()[0]
    states = 2 * (128 + 8) * 512 * 128 * 4  # exact and rounded, in fp32
    monkeypatch.setattr(tune, "available_ram", lambda: tune_bytes(job) + states - 1)
    with pytest.raises(ConfigError, match=r"trains the whole model at once.*cpu has .* GB free"):
        check_room(job)
    monkeypatch.setattr(tune, "available_ram", lambda: tune_bytes(job) + states)
    check_room(job)
