"""The massive activation of a first token: it is there, the function stays, and calibration lives with it."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from massive import MASSIVE, make_massive, silenced
from qrt.assets import model_path
from qrt.text.tokenizer import Tokenizer
from qrt_eval.protocol import PROTOCOLS
from qrt_eval.text import load_text

pytestmark = [pytest.mark.model, pytest.mark.slow]
TINY = model_path("tiny")


@pytest.fixture(scope="module")
def massive(tmp_path_factory):
    """Return the folder of the bundled model with a massive activation."""
    return make_massive(TINY, tmp_path_factory.mktemp("massive") / "tiny-massive")


@pytest.fixture(scope="module")
def ids():
    """Return two windows of 256 tokens of pydoc, each with BOS in front."""
    windows = PROTOCOLS["llamacpp"].windows(load_text("pydoc"), Tokenizer("tiny"), 256, None, 2)
    return torch.tensor([window.ids for window in windows])


@torch.no_grad()
def run(model, ids):
    """Return log-probabilities [2, 256, V] and streams, behind the embedding and each layer."""
    streams = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, output: streams.append(output))
    return model(ids).logits.log_softmax(-1), streams


def perplexity(logprobs, ids):
    return float(F.nll_loss(logprobs[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp())


def test_the_first_token_is_massive_until_the_last_layer_and_the_function_stays(massive, ids):
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
