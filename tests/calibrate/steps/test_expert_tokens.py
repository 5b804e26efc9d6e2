"""Which tokens count for an expert: those that choose it, and the closest others where these are few."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import qrt
from byte_tokenizer import save_tokenizer
from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate.job.plan import plan
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.model.reference import mixture_of
from qrt_calibrate.model.spelled import spelled_out
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.rounding.fold import Pair
from qrt_calibrate.steps import experts
from qrt_calibrate.steps.experts import Census, Picker
from zoo import MODELS, make

CPU = torch.device("cpu")
EXPERTS, CHOSEN = 6, 2


def chooser(logits):
    """A mixture whose router's logits for the tokens x [T] are rows of `logits`."""
    return SimpleNamespace(
        choose=lambda x: (None, logits[x].topk(CHOSEN).indices), judged=lambda x: logits[x]
    )


@pytest.mark.parametrize("least", [1, 40, 90, 200])
def test_few_tokens_are_topped_up_by_the_closest(least, monkeypatch):
    """In batches of several sizes: every expert gets what it lacks, no more, from each batch its share."""
    monkeypatch.setattr(experts, "LEAST_TOKENS", least)
    total = 150
    logits = torch.randn(total, EXPERTS) + torch.tensor([3.0, 1.0, 0.0, 0.0, -1.0, -4.0])
    chose = torch.zeros(total, EXPERTS).scatter_(1, logits.topk(CHOSEN).indices, 1.0)
    census = Census(chose.sum(0).long(), total, 1.0, every=False)
    picker, found = Picker(census, CPU), torch.zeros(total, EXPERTS)
    for batch in torch.arange(total).split([70, 50, 30]):
        picked = picker.pick(chooser(logits), batch)
        margin = (logits - logits.topk(CHOSEN).values[:, -1:])[batch]
        for number, own in enumerate(picked):
            assert torch.equal(own, own.sort().values) and len(own.unique()) == len(own)
            mine = chose[batch, number] > 0
            assert set(mine.nonzero().flatten().tolist()) <= set(own.tolist())
            further = [token for token in own.tolist() if not mine[token]]
            nearest = margin[:, number].masked_fill(mine, -math.inf).topk(len(further)).indices
            assert set(further) == set(nearest.tolist())
            found[batch[own], number] = 1
    assert torch.equal(found.sum(0).long(), chose.sum(0).long().clamp(min=min(least, total)))
    assert census.figures()["experts topped up"] == (chose.sum(0) < min(least, total)).sum()


def test_all_tokens_count_for_every_expert_if_asked():
    census = Census(torch.tensor([5, 0, 3]), 8, 1.0, every=True)
    picked = Picker(census, CPU).pick(chooser(torch.randn(8, 3)), torch.arange(4))
    assert [own.tolist() for own in picked] == [[0, 1, 2, 3]] * 3
    assert (census.chosen + census.lacking).tolist() == [
        8,
        8,
        8,
    ] and "experts topped up" not in census.figures()


@pytest.mark.parametrize("name", [name for name in MODELS if "experts" in name or "moe" in name])
@torch.no_grad()
def test_routers_choose_alike_before_and_after_folds(name, tmp_path):
    make(name, tmp_path)
    job = plan(open_checkpoint(tmp_path), recipe_of({"method": "rtn", "group_size": 32}), CPU)
    executor = LayerExecutor(job.checkpoint, job.arch, 24, CPU)
    index = max(index for index, layer in enumerate(job.arch.layers) if layer.sparse)
    layer, smooth = executor.load_stored(index), job.arch.at(index).smooth
    x = torch.randn(48, job.arch.hidden_size)
    weights, chosen = mixture_of(layer).choose(x)
    scales = torch.exp2(torch.randint(-3, 4, (job.arch.hidden_size,)).float())
    pair = next(own for own in smooth if own.routers)
    Pair(layer, pair, job.arch.head_dim).fold(scales)
    after, same = mixture_of(layer).choose(x / scales)
    assert torch.equal(same, chosen) and torch.equal(after, weights)
    _, other = mixture_of(layer).choose(x)
    assert not torch.equal(other, chosen)


@pytest.mark.parametrize("name", ["gpt_oss"])
def test_stacked_experts_are_spelled_out(name, tmp_path):
    """The slices, taken by hand, and their specs."""
    make(name, tmp_path)
    stored = open_checkpoint(tmp_path)
    job = plan(stored, recipe_of({"method": "rtn", "group_size": 32}), CPU)
    spelled, own = job.checkpoint, job.arch.experts
    assert own.stacked is None and spelled.num_bytes == stored.num_bytes and job.source is stored
    assert all(spelled.spec(name).shape == tuple(spelled.tensor(name).shape) for name in spelled.names())
    whole, bias = (stored.tensor(f"model.layers.1.mlp.experts.gate_up_proj{end}") for end in ("", "_bias"))
    for number in (0, own.count - 1):
        gate, up = (f"model.layers.1.mlp.experts.{number}.{part}_proj" for part in ("gate", "up"))
        assert torch.equal(spelled.tensor(f"{gate}.weight"), whole[number, :, 0::2].T)
        assert torch.equal(spelled.tensor(f"{up}.weight"), whole[number, :, 1::2].T)
        assert torch.equal(spelled.tensor(f"{up}.bias"), bias[number, 1::2])
    assert spelled_out(spelled, job.arch) == (spelled, job.arch)


def test_an_interrupted_mixture_continues_to_the_same_bytes(tmp_path, calib, monkeypatch):
    """And its report counts tokens."""
    make("qwen2_moe", tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    settings = {
        "bits": 4,
        "group_size": 32,
        "method": "gptq",
        "n_samples": 4,
        "seqlen": 32,
        "eval_samples": 1,
    }

    def run(out):
        return qrt.calibrate(tmp_path / "model", tmp_path / out, calib=str(calib), **settings)

    run("whole")
    count = experts.count_tokens

    def interrupted(bench, every):
        if bench.index == 3:
            raise KeyboardInterrupt
        return count(bench, every)

    monkeypatch.setattr("qrt_calibrate.steps.layer.count_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("out")
    monkeypatch.setattr("qrt_calibrate.steps.layer.count_tokens", count)
    run("out")
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    layers = json.loads((tmp_path / "out" / "qrt_report.json").read_text())["layers"]
    assert ["fewest tokens" in layer for layer in layers] == [False, True, False, True]
    assert layers[1]["median tokens"] > layers[1]["fewest tokens"] and layers[1]["experts topped up"] == 8
    assert 0.5 < layers[1]["same experts"] <= 1
    page = (tmp_path / "out" / "qrt_report.html").read_text()
    assert "<th>fewest tokens</th>" in page and "<th>experts topped up</th>" in page
