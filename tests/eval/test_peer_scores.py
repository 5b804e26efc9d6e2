"""eval/peers/score.py, which compares other tools' checkpoints with the original."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from qrt.quant.spec import Granularity, QuantSpec
from tiny_models import quantize_checkpoint, random_checkpoint

PEERS = Path(__file__).parents[2] / "eval" / "peers"
IDS = torch.arange(40) * 37 % 512
G64 = QuantSpec(4, False, Granularity.GROUP, 64)


@pytest.fixture
def score(monkeypatch):
    monkeypatch.syspath_prepend(PEERS)
    import score

    return score


def test_figures_of_a_window(score):
    torch.manual_seed(0)
    found, exact = torch.randn(2, 39, 512).log_softmax(-1)
    exact[:13] = found[:13]
    loss, kl, same = score.compare(found, exact, IDS).tolist()
    assert loss == pytest.approx(F.nll_loss(found, IDS[1:]).item())
    assert kl == pytest.approx(
        F.kl_div(found, exact, reduction="batchmean", log_target=True).item(), rel=1e-5
    )
    assert same == pytest.approx(13 / 39)


def test_int4_checkpoint_computes_as_in_transformers(score, tmp_path):
    plain = random_checkpoint(tmp_path / "plain", "LlamaForCausalLM")
    quantize_checkpoint(plain, tmp_path / "int4", "w4a16", G64)
    model, bits = score.load(tmp_path / "int4")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "int4", dtype=torch.float32)
    with torch.no_grad():
        expected = reference(IDS[None, :-1]).logits[0].log_softmax(-1)
    assert torch.allclose(score.logprobs(model, IDS), expected, atol=1e-4)
    assert bits == pytest.approx(4 + (32 + 4) / 64)  # fp32 scales and 4-bit zeros


@pytest.mark.parametrize("scheme, spec", [
    ("w8a8", QuantSpec(8, True, Granularity.CHANNEL)), ("w4a8", replace(G64, progressive=True)),
])  # fmt: skip
def test_int8_tokens_round_inputs(score, scheme, spec, tmp_path):
    plain = random_checkpoint(tmp_path / "plain", "LlamaForCausalLM")
    quantize_checkpoint(plain, tmp_path / "int8", scheme, spec)
    model, _ = score.load(tmp_path / "int8")
    seen = []
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    score.logprobs(model, IDS)
    levels = [len(token.unique()) for token in seen[0][0]]
    assert max(levels) <= 255 and min(levels) > 20


def test_original_has_no_kl_to_itself(score, tmp_path):
    plain = random_checkpoint(tmp_path / "plain", "LlamaForCausalLM")
    model, _ = score.load(plain)
    exact = [score.logprobs(model, IDS)]
    found = score.row(plain, exact, IDS[None])
    assert found["kl"] == 0 and found["same_top1"] == 1 and found["bits_per_weight"] == 32
    assert found["ppl"] == score.original_ppl(exact, IDS[None])
