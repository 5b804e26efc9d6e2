"""Test `qrt-eval sweep` end to end on the bundled model, with its picture and its page."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from errors import assert_error
from qrt.assets import model_path
from qrt.errors import ConfigError
from qrt_eval import sweep
from qrt_eval.cli import main, parser
from qrt_eval.quality import kld
from qrt_eval.quality.forward import CHUNK_TOKENS
from qrt_eval.reports import pareto
from result_schema import checked

pytest.importorskip("matplotlib", reason="pip install qrt[plot]")

FLAGS = (
    "--limit 1 --seqlen 64 --batch 2 --num-prompts 2 --input-len 8 --output-len 4 --repeats 1 --context 512"
)


class Links(HTMLParser):
    """Collect what a page would fetch: every src, and every href that leaves it."""

    def __init__(self):
        super().__init__()
        self.found, self.text = [], []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "srcset", "data") or name.endswith("href") and not value.startswith("#"):
                self.found.append(value)
        assert tag not in ("link", "script", "img", "iframe", "object")

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.model
@pytest.mark.slow
def test_a_sweep_of_the_bundled_model(tmp_path, tmp_path_factory, monkeypatch, capsys):
    from qrt_calibrate.cli import main as calibrate

    quantized = tmp_path_factory.mktemp("models") / "w8a8"
    flags = f"--model tiny --scheme w8a8 --method rtn --eval-samples 0 --out {quantized}"
    assert calibrate(flags.split()) == 0
    words = f"sweep --model tiny --weights 16 w8a8 --kv fp16 {FLAGS} --memory-gib 0.05".split()
    words += ["--out", str(tmp_path), "--checkpoint", f"w8a8={quantized}"]
    calls, measure = [], sweep.measure

    def interrupted(*args):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(args[1:3])
        return measure(*args)

    monkeypatch.setattr(sweep, "measure", interrupted)
    assert main(words) == 130 and (tmp_path / "result.json.partial").exists()
    monkeypatch.setattr(sweep, "measure", lambda *args: calls.append(args[1:3]) or measure(*args))
    assert main(words) == 0
    pairs = [("fp16", "fp16"), ("w8a8", "fp16")]
    assert calls == pairs  # each once; the interrupted one on the second run
    result = checked(tmp_path / "result.json")
    cells = {(cell["weights"], cell["kv"]): cell for cell in result["cells"]}
    assert list(cells) == pairs
    plain, other = (cells[pair] for pair in pairs)
    assert plain["kl_mean"] == 0 == plain["ppl_change"] and 0 < other["kl_mean"] < 0.01
    assert plain["kv_bytes_per_token"] == 6 * 2 * 64 * 2 * 2  # layers, KV heads, head dim, K and V, bf16
    room = 0.05 * (1 << 30) * 0.9 - other["weight_bytes"]
    assert other["max_concurrent_requests"] == int(room / (512 * other["kv_bytes_per_token"]))
    assert other["tokens_per_second"] > 0 and not (tmp_path / "result.json.partial").exists()
    assert "w8a8" in capsys.readouterr().out

    page = (tmp_path / "report.html").read_text()
    links = Links()
    links.feed(page)
    assert not links.found and not re.search(r"@import|url\((?!#)", page)
    shown = " ".join(links.text)
    assert f"{other['ppl']:.3f}" in shown and f"{other['kl_mean']:.2e}" in shown and "--memory-gib" in shown
    assert page.count("<svg") == 1 and "16-bit KV" in shown
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "pareto.svg").read_text()
    assert pareto.fingerprint(tmp_path / "result.json") in svg
    pareto.draw(tmp_path / "result.json", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == svg  # drawing twice gives the same bytes


def test_a_shape_has_bytes_and_speed_only(tmp_path, small_shape, capsys):
    words = f"sweep --shape small --weights 4 --kv int8 {FLAGS} --out {tmp_path}"
    assert main(words.split()) == 0
    (cell,) = checked(tmp_path / "result.json")["cells"]
    assert cell["ppl"] is None and cell["tokens_per_second"] > 0 and cell["checkpoint"] is None
    assert "Random weights" in (tmp_path / "report.html").read_text()
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "ppl" not in shown and "KL" not in shown, "no empty columns"


def test_missing_checkpoints_are_made(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr("qrt_calibrate.cli.main", lambda words: made.append(words) or 1)
    words = f"sweep --model tiny --weights 4 --kv int8 {FLAGS} --out {tmp_path}"
    assert main(words.split()) == 1
    ((_, model, *others),) = made
    assert model.endswith("tiny") and others == ["--scheme", "w4a16", "--out", str(tmp_path / "tiny-w4")]
    assert_error(capsys.readouterr().err, "w4a16", "qrt-calibrate", "--checkpoint")


def test_made_checkpoint_is_reused_for_its_model_only(tmp_path, monkeypatch):
    """A model replaced by another of the same name needs a new checkpoint."""
    made = []

    def calibrate(words):
        made.append(words)
        shutil.copytree(model_path("tiny"), words[-1])
        return 0

    monkeypatch.setattr("qrt_calibrate.cli.main", calibrate)
    model = shutil.copytree(model_path("tiny"), tmp_path / "model")
    words = f"sweep --model {model} --weights 4 --kv fp16 {FLAGS} --out {tmp_path / 'out'}"
    read = sweep.Sweep.read(parser().parse_args(words.split()))
    for _ in range(2):
        assert sweep.checkpoint_of(read, "w4a16") == str(tmp_path / "out" / "model-w4")
    assert len(made) == 1
    keys = [sweep.cell_key(read, "w4a16", "fp16", made[0][-1])]
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    keys.append(sweep.cell_key(read, "w4a16", "fp16", made[0][-1]))
    assert keys[0] != keys[1], "change and KL are against the model"
    for damage in (None, (tmp_path / "out" / "model-w4.source").unlink):
        if damage is not None:
            damage()
        with pytest.raises(ConfigError, match="model-w4: .* --checkpoint w4a16="):
            sweep.checkpoint_of(read, "w4a16")


def test_pareto_front():
    points = [(1, 0.1), (2, 0.3), (3, 0.2), (3, 0.5), (0.5, 0.1)]
    assert pareto.frontier(points, less_y=True) == [(3, 0.2), (1, 0.1)]
    assert pareto.frontier([(1, 9), (2, 5), (3, 7)], less_y=False) == [(3, 7), (1, 9)]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--weights 16 w2a8", ["--weights", "'w2a8'", "w4a16"]),
        ("--weights 16,w2a8", ["--weights", "'w2a8'"]),
        ("--weights ,", ["--weights", "''"]),
        ("nothing.txt", ["nothing.txt"]),
        (
            "--weights 16 mxfp4",
            ["--weights mxfp4", "qrt-calibrate does not make", "--checkpoint mxfp4=MODEL"],
        ),
        ("--checkpoint w4=tiny", ["--checkpoint", "'w4'", "16, 8, 4, "]),
        ("--checkpoint nothing", ["--checkpoint", "SCHEME=MODEL", "'nothing'"]),
        ("--checkpoint 4=", ["--checkpoint", "SCHEME=MODEL", "'4='"]),
        ("--weights 8 --checkpoint 4=tiny", ["--checkpoint", "--weights 8", "4=tiny"]),
        ("--checkpoint 4=no/such", ["no/such"]),
        ("--seqlen 2049", ["--seqlen 2049", "2048", "tiny"]),
        ("--input-len 2048", ["--input-len", "--output-len", "2112", "2048", "tiny"]),
        (f"--out {__file__}", ["--out", f"{__file__}/result.json"]),
    ],
)
def test_bad_input(flags, named, capsys):
    assert main(["sweep", "--model", "tiny", *flags.split()]) == 1
    assert_error(capsys.readouterr().err, *named)


def test_sweep_picture_without_some_formats(tmp_path):
    """Unknown schemes get their own colour and marker."""
    cell = {"max_concurrent_requests": 3, "tokens_per_second": 5.0, "kl_mean": 0.1}
    cells = [
        {**cell, "weights": "w3", "kv": "k8v4"},
        {**cell, "weights": "fp16", "kv": "fp16", "kl_mean": 0.0},
    ]
    facts = {"model": "m", "cells": cells, "context_tokens": 1, "memory_bytes": 1 << 30, "batch": 1}
    (tmp_path / "r.json").write_text(json.dumps({**facts, "environment": {"device": "d"}}))
    pareto.draw(tmp_path / "r.json", tmp_path / "r.svg")
    assert "k8v4 KV" in (tmp_path / "r.svg").read_text()


def test_quality_defaults_equal_those_of_kld():
    arguments = parser().parse_args(["kld", "pydoc", "--model", "tiny"])
    assert (arguments.top_p, arguments.chunk) == (kld.TOP_P, CHUNK_TOKENS)
