"""The massive activation of a first token: it is there, the function stays, and calibration lives with it."""

import json
import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch
from massive import MASSIVE, make_massive, save, silenced
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from qrt.assets import model_path
from qrt.text.tokenizer import Tokenizer
from qrt_calibrate.cli import main as calibrate
from qrt_calibrate.text.text import docstrings
from qrt_eval.inputs.text import load_text
from qrt_eval.quality.protocol import PROTOCOLS

pytestmark = [pytest.mark.model, pytest.mark.slow]
TINY = model_path("tiny")


@pytest.fixture(scope="module")
def massive(tmp_path_factory):
    """Return the folder of the bundled model with a massive activation."""
    return make_massive(TINY, tmp_path_factory.mktemp("massive") / "tiny-massive")


@pytest.fixture(scope="module")
def ids():
    """Return windows of 256 tokens of pydoc, each with BOS in front, int64 [8, 256]."""
    windows = PROTOCOLS["llamacpp"].windows(load_text("pydoc"), Tokenizer("tiny"), 256, None, 8)
    return torch.tensor([window.ids for window in windows])


@torch.no_grad()
def run(model, ids):
    """Return log-probabilities [8, 256, V], and the streams behind each layer."""
    streams = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, output: streams.append(output))
    return model(ids).logits.log_softmax(-1), streams


def perplexity(logprobs, ids):
    return float(F.nll_loss(logprobs[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp())


def test_only_the_first_token_is_massive(massive, ids):
    plain, channel = silenced(TINY)
    expected, calm = run(plain, ids)
    found, streams = run(AutoModelForCausalLM.from_pretrained(massive, dtype=torch.float32), ids)
    rms = [stream.square().mean(-1).sqrt() for stream in streams]
    assert rms[0][0, 0] < 2 * rms[0].median()
    for layer in (1, 2, 3, 4):
        assert (rms[layer][:, 0] > 50 * rms[layer].median()).all()
        assert (rms[layer][:, 1:] < 5 * rms[layer].median()).all()
        assert streams[layer][0, 0].abs().argmax() == channel
    was = [float(stream[0, 0].square().mean().sqrt()) for stream in calm]
    assert float(rms[1][0, 0]) == pytest.approx(MASSIVE * was[1], rel=0.3)
    assert float(rms[-1][0, 0]) == pytest.approx(was[-1], rel=0.05)
    kl = (expected.exp() * (expected - found)).sum(-1)
    assert kl[:, 1:].max() < 1e-4 and kl[:, 0].max() < 0.01
    tiny, _ = run(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), ids)
    assert perplexity(found, ids) == pytest.approx(perplexity(tiny, ids), rel=0.02)


def in_int4(folder, text, seqlen):
    """Calibrate the model in a folder on eight windows of a text."""
    file, out = Path(f"{folder}.txt"), Path(f"{folder}-w4-{seqlen}")
    file.write_text(text[:200_000])
    words = f"--bits 4 --n-samples 8 --seqlen {seqlen} --eval-samples 0 --calib {file}".split()
    assert calibrate(["--model", str(folder), "--out", str(out), *words]) == 0
    return out


@pytest.mark.exhaustive  # with fewer windows the divergence is too random
def test_a_massive_activation_moves_int4_little(massive, ids, default_text, tmp_path):
    """Beside a model that computes the same without one; errors weighed by energy cost 1.18 times as much."""

    def divergence(folder):
        out = in_int4(folder, "\n\n".join(default_text[0]), 512)
        models = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (folder, out))
        exact, rounded = (run(model, ids)[0] for model in models)
        return float((exact.exp() * (exact - rounded)).sum(-1)[:, 1:].mean())

    calm = divergence(save(silenced(TINY)[0], TINY, tmp_path / "calm"))
    assert 0.005 < calm and divergence(massive) < 1.1 * calm


def test_a_massive_activation_costs_int4_little(massive, tmp_path):
    """In each layer hardly more than in a model that computes the same without one.

    If errors are weighed by energy, the two layers behind the activation lose 1.32 and 1.18 times as much.
    """
    text = "\n\n".join(islice(docstrings(Path(sysconfig.get_paths()["stdlib"])), 1000))

    def errors(folder):
        report = json.loads((in_int4(folder, text, 128) / "qrt_report.json").read_text())
        return [layer["output error"] for layer in report["layers"]]

    calm = errors(save(silenced(TINY)[0], TINY, tmp_path / "calm"))
    pairs = list(zip(errors(massive), calm, strict=True))
    assert all(0.02 < usual and own < 1.1 * usual for own, usual in pairs), pairs
