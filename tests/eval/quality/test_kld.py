"""Test `qrt-eval kld`: figures by definition, transformers as the truth, saved baselines, chunks."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tiny_variants import fewer_merges, noisy, shorter_context
from transformers import AutoModelForCausalLM

from errors import assert_names
from qrt.assets import model_path
from qrt.errors import ConfigError, QrtError
from qrt_eval.cli import main
from qrt_eval.inputs.text import load_text
from qrt_eval.quality import divergence, kld, reference
from qrt_eval.quality.protocol import PROTOCOLS, Window
from result_schema import checked

TINY = model_path("tiny")


def test_figures_match_their_definition():
    """Compute them with numpy, on distributions that differ much."""
    torch.manual_seed(0)
    base, model = torch.randn(40, 11), torch.randn(40, 11)
    targets = torch.randint(0, 11, (40,))
    found = divergence.compare(base, model, targets, top_p=0.7)
    p, q = base.double().softmax(-1), model.double().softmax(-1)
    pairs = zip(p.tolist(), q.tolist(), strict=True)
    kl = np.array([sum(a * math.log(a / b) for a, b in zip(*pair, strict=True)) for pair in pairs])
    assert found.kl.numpy() == pytest.approx(kl)
    base_dp, dp = (x.gather(1, targets[:, None])[:, 0].numpy() for x in (p, q))
    base_loss, loss, dp = -np.log(base_dp), -np.log(dp), dp - base_dp
    same = (p.argmax(-1) == q.argmax(-1)).numpy()
    flips = [(int(t) in nucleus(a)) != (int(t) in nucleus(b)) for t, a, b in zip(targets, p, q, strict=True)]
    assert found.top_p_flip.tolist() == flips and 0 < sum(flips) < 40

    def standard_error(values):
        return values.std(ddof=1) / 40**0.5

    places = (99.9, 99, 95, 90, 50, 10, 5, 1)
    assert divergence.figures(found) == pytest.approx({
        "kl_mean": kl.mean(), "kl_se": standard_error(kl), "kl_max": kl.max(), "kl_min": kl.min(),
        "ln_ppl_ratio": (loss - base_loss).mean(), "ln_ppl_ratio_se": standard_error(loss - base_loss),
        "ln_ppl_corr": np.corrcoef(loss, base_loss)[0, 1],
        "top1_agreement": same.mean(), "top1_agreement_se": standard_error(same),
        "top_p_flips": sum(flips) / 40, "dp_mean": dp.mean(), "dp_rms": np.square(dp).mean() ** 0.5,
        **{f"{name}_p{at}": np.percentile(x, at) for name, x in (("kl", kl), ("dp", dp)) for at in places},
    })  # fmt: skip


def nucleus(p: torch.Tensor) -> set[int]:
    """Return the smallest set of likeliest tokens with a probability of at least 0.7."""
    mass, found = 0.0, set()
    for token in p.argsort(descending=True).tolist():
        if mass >= 0.7:
            break
        found.add(token)
        mass += float(p[token])
    return found


def test_model_against_itself_is_zero():
    logits = torch.randn(7, 50) * 5
    figures = divergence.figures(divergence.compare(logits, logits, torch.arange(7), 0.9))
    assert figures["kl_max"] == 0 == figures["top_p_flips"] == figures["ln_ppl_ratio"]
    assert figures["top1_agreement"] == 1
    exact = logits.double()
    near = divergence.compare(exact, exact + 1 / 3, torch.arange(7), 0.9)  # equal up to rounding
    assert 0 <= near.kl.min() and near.kl.max() < 1e-12


def test_one_position_has_no_spread():
    """The spread is 0 and not NaN, which JSON does not have."""
    base, model = torch.randn(2, 1, 50)
    figures = divergence.figures(divergence.compare(base, model, torch.tensor([3]), 0.9))
    assert figures["kl_se"] == figures["ln_ppl_ratio_se"] == figures["top1_agreement_se"] == 0
    assert figures["kl_p99.9"] == figures["kl_p1"] == figures["kl_mean"] > 0 and figures["ln_ppl_corr"] == 1


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    return noisy(tmp_path_factory.mktemp("models") / "noisy")


@pytest.fixture(scope="module")
def by_transformers(changed):
    """Return mean KL, top-1 agreement and both perplexities over 3 windows of 200 tokens of pydoc."""
    windows = PROTOCOLS["gptq"].windows(load_text("pydoc"), tokenizer(), 200, None, 3)
    kl, same, nll = [], [], {"base": [], "model": []}
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (TINY, changed)]
    for window in windows:
        ids = torch.tensor(window.ids)
        with torch.no_grad():
            base, model = (m(ids[None]).logits[0, :-1].double().log_softmax(-1) for m in models)
        kl.append((base.exp() * (base - model)).sum(-1))
        same.append(base.argmax(-1) == model.argmax(-1))
        for name, logp in (("base", base), ("model", model)):
            nll[name].append(-logp.gather(-1, ids[1:, None]).mean())
    ppl = {name: float(torch.stack(values).mean().exp()) for name, values in nll.items()}
    return float(torch.cat(kl).mean()), float(torch.cat(same).double().mean()), ppl


def tokenizer():
    from qrt.text.tokenizer import Tokenizer

    return Tokenizer("tiny")


@pytest.mark.model
@pytest.mark.parametrize("chunk", [2048, 64])
def test_kl_equals_transformers(changed, by_transformers, tmp_path, chunk):
    out = tmp_path / "k.json"
    words = f"kld pydoc --model {changed} --baseline tiny --seqlen 200 --limit 3 --chunk {chunk} --json {out}"
    assert main(words.split()) == 0
    result = checked(out)
    (run,) = result["runs"]
    kl, same, ppl = by_transformers
    assert run["kl_mean"] == pytest.approx(kl, rel=1e-4) and kl > 1e-3
    assert run["top1_agreement"] == pytest.approx(same, abs=2 / 597)
    assert run["base_ppl"] == pytest.approx(ppl["base"], rel=1e-4)
    assert run["ppl"] == pytest.approx(ppl["model"], rel=1e-4)
    assert run["tokens"] == 597 and result["baseline"]["model"] == "tiny"
    worst = [row["kl"] for row in run["worst"]]
    assert worst == sorted(worst, reverse=True) and worst[0] == run["kl_max"]


@pytest.mark.model
def test_windows_fit_the_shortest_context(tmp_path):
    short, out = shorter_context(tmp_path / "short"), tmp_path / "r.json"
    assert main(f"kld pydoc --model tiny {short} --limit 1 --json {out}".split()) == 0
    assert json.loads(out.read_text())["seqlen"] == 64


@pytest.mark.model
def test_saved_baseline_gives_the_same_figures(changed, tmp_path, capsys):
    saved, live, read = tmp_path / "base.safetensors", tmp_path / "live.json", tmp_path / "read.json"
    words = f"kld pydoc --model tiny --kv int8 int4 --seqlen 128 --limit 2 --save-base {saved} --json {live}"
    assert main(words.split()) == 0
    assert main(f"kld --model tiny --kv int8 int4 --base-file {saved} --json {read}".split()) == 0
    first, second = (json.loads(path.read_text())["runs"] for path in (live, read))
    assert [run["kl_mean"] for run in first] == [run["kl_mean"] for run in second]
    int8, int4 = first
    assert 0 < int8["kl_mean"] < 1e-3 < int4["kl_mean"] < 0.1 and int8["top1_agreement"] > 0.98
    assert "int4" in capsys.readouterr().out


def test_full_disk_fails_save_base(tmp_path, monkeypatch):
    """The error is one line, no part of a file is left, and an earlier file stays."""

    def full(tensors, path, metadata):
        path.write_bytes(b"the beginning")
        raise SafetensorError("No space left on device")

    base = reference.ReferenceLogprobs({}, [Window((1, 2), 1, 1)], [torch.zeros(1, 4)], torch.zeros(9, 4))
    path = tmp_path / "base.safetensors"
    base.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(reference, "save_file", full)
    with pytest.raises(QrtError, match=r"--save-base.*base\.safetensors.*No space left"):
        base.save(path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


@pytest.mark.model
def test_interrupted_run_resumes(tmp_path, capsys, monkeypatch):
    """After a stop in the second format, the first is not computed again, and the baseline only as needed."""
    out = tmp_path / "k.json"
    words = f"kld pydoc --model tiny --kv int8 int4 --seqlen 64 --limit 4 --json {out}".split()
    states, compare, compared = kld.scored_states, kld.window_positions, []

    def interrupted(*arguments):
        if len(compared) == 6:
            raise KeyboardInterrupt
        compared.append(arguments)
        return compare(*arguments)

    monkeypatch.setattr(kld, "window_positions", interrupted)
    assert main(words) == 130 and not out.exists()
    partial = tmp_path / "k.json.partial"
    partial.write_text(partial.read_text() + '{"run": "cut o')  # an unfinished last line
    compared.clear()
    read = []
    monkeypatch.setattr(kld, "scored_states", lambda *a: read.append(a) or states(*a))
    assert main([*words, "--top-p", "0.5", "--limit", "1"]) == 0, "another run takes up nothing of it"
    assert len(compared) == 2 and not partial.exists()

    compared.clear()
    monkeypatch.setattr(kld, "window_positions", interrupted)
    assert main(words) == 130
    compared.clear(), read.clear()
    capsys.readouterr()
    assert main(words) == 0
    assert len(compared) == 2 and len(read) == 4, "two windows of the baseline, and of int4"
    said = capsys.readouterr().err
    assert "KV int8: 4 of 4 windows" in said and "KV int4: 2 of 4 windows" in said
    resumed = checked(out)["runs"]
    assert not partial.exists()
    monkeypatch.setattr(kld, "window_positions", compare)
    assert main([*words[:-1], str(tmp_path / "whole.json")]) == 0
    whole = json.loads((tmp_path / "whole.json").read_text())["runs"]
    for one, other in zip(resumed, whole, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


@pytest.mark.model
def test_baseline_has_no_worst_positions(tmp_path, capsys):
    out = tmp_path / "k.json"
    words = f"kld pydoc --model tiny --kv fp16 int4 --seqlen 64 --limit 1 --worst 2 --json {out}"
    assert main(words.split()) == 0
    itself, int4 = checked(out)["runs"]
    assert itself["kl_max"] == 0 and itself["worst"] == [] and len(int4["worst"]) == 2
    shown = capsys.readouterr().out
    assert "worst positions of tiny, KV int4" in shown and shown.count("worst positions") == 1


@pytest.mark.model
def test_rows_of_logits_are_bounded(monkeypatch):
    """No more rows than LOGITS_BYTES allows are compared at once, however long the window."""
    rows, compare = [], divergence.compare
    monkeypatch.setattr(kld, "LOGITS_BYTES", 8 * 4096 * 10)
    monkeypatch.setattr(kld.divergence, "compare", lambda *a: rows.append(len(a[0])) or compare(*a))
    assert main("kld pydoc --model tiny --kv int8 --seqlen 64 --limit 1 --worst 1".split()) == 0
    assert max(rows) == 10 and sum(rows) == 63


@pytest.mark.model
def test_lmeval_documents_fill_whole_windows(tmp_path):
    """lmeval's windows have one token more than --seqlen; all but the first token are scored."""
    (tmp_path / "a.txt").write_text("Some words of a short document. " * 9)
    out = tmp_path / "k.json"
    words = f"kld {tmp_path / 'a.txt'} --model tiny --kv int4 --protocol lmeval --seqlen 32 --json {out}"
    assert main(words.split()) == 0
    (run,) = checked(out)["runs"]
    assert run["tokens"] == len(tokenizer().encode((tmp_path / "a.txt").read_text())) and run["kl_mean"] > 0


@pytest.mark.model
def test_other_tokenizer_is_refused(tmp_path, capsys):
    other = fewer_merges(tmp_path / "other")
    assert main(f"kld pydoc --model {other} --baseline tiny --seqlen 64 --limit 1".split()) == 1
    assert_names(capsys.readouterr().err, "error:", str(other), "tokenizer", "qrt-eval ppl --baseline")


def test_wrong_kind_of_base_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(ConfigError, match=r"--base-file.*--save-base.*x\.safetensors"):
        reference.load(path, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"--base-file.*--save-base.*model\.safetensors"):
        reference.load(TINY / "model.safetensors", torch.device("cpu"))
