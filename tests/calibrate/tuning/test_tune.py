"""Training end to end: its gradients, and what becomes of a checkpoint."""

import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from qrt.assets import model_path
from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate import cli
from qrt_calibrate.job.plan import plan
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.steps.advance import WindowStates
from qrt_calibrate.tuning import parameters, training, tune

CPU = torch.device("cpu")
FLAGS = ["--bits", "4", "--group-size", "64", "--n-samples", "4", "--seqlen", "64", "--eval-samples", "4"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("BATCH", 4), ("DRAWN", 8), ("WINDOW", 48)):
        monkeypatch.setattr(training, name, value)
    for name, value in (("MICRO_TOKENS", 100), ("WARMUP", 2)):
        monkeypatch.setattr(tune, name, value)


def test_gradients_equal_those_of_the_loss(llama):
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


def calibrated(model, calib, out, *flags):
    words = ["--model", model, "--calib", calib, "--out", out, "--method", "gptq", *FLAGS, *flags]
    assert cli.main([str(word) for word in words]) == 0
    return out, json.loads((out / "qrt_report.json").read_text())


@pytest.mark.slow
@pytest.mark.model
def test_tuning_brings_a_checkpoint_closer_to_the_original(calib, tmp_path, monkeypatch):
    """The bundled model on the same drawn windows at every step: those it must learn."""
    monkeypatch.setattr(parameters, "CODE_RATE", 0.05)
    monkeypatch.setattr(parameters, "SCALE_RATE", 0.005)
    drawn = tune.drawn_windows
    monkeypatch.setattr(
        tune, "drawn_windows", lambda *arguments: itertools.repeat(next(drawn(*arguments))[:4])
    )
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
    interrupted(WindowStates, "run_again")  # trained and written
    out, _ = calibrated(llama, calib, tmp_path / "out", "--tune", 3)
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
