"""Test `qrt-eval ppl`: quantized KV, batches, interrupted runs, bad input."""

import json
import math
import runpy
import sys

import pytest
import torch
from quantized_kv import quantized_model
from tiny_variants import fewer_merges, shorter_context

from errors import assert_error, assert_names
from qrt import LLM
from qrt.assets import model_path
from qrt.text.tokenizer import Tokenizer
from qrt_eval.cli import main
from qrt_eval.inputs.text import load_text
from qrt_eval.quality import ppl as module
from qrt_eval.quality.partial import PartialResult, cut_of
from qrt_eval.quality.ppl import perplexity, quick_perplexity
from qrt_eval.quality.protocol import PROTOCOLS
from result_schema import checked
from tiny_models import altered

SETTINGS = {"attend_cache": True, "enable_prefix_caching": False}


def test_windows_do_not_overlap_and_drop_the_tail(tmp_path):
    (tmp_path / "a.txt").write_text("some words and more of them " * 20)
    text, llm = load_text(str(tmp_path / "a.txt")), LLM("tiny", **SETTINGS)
    ids = llm.tokenizer.encode(text.text)
    windows = PROTOCOLS["gptq"].windows(text, llm.tokenizer, 16, None, None)
    assert [token for window in windows for token in window.ids] == ids[: len(ids) // 16 * 16]
    assert len(PROTOCOLS["gptq"].windows(text, llm.tokenizer, 16, None, 2)) == 2


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The bundled model with activations too large for float16."""

    def change(tensors):
        tensors["model.layers.2.post_attention_layernorm.weight"] *= 1e5

    return altered(model_path("tiny"), tmp_path_factory.mktemp("models") / "wide", change)


@pytest.mark.parametrize(
    "command",
    [
        "ppl pydoc --seqlen 16 --limit 2",
        "kld pydoc --seqlen 16 --limit 2 --baseline tiny",
        "kld pydoc --seqlen 16 --limit 2",
        "passkey --kv fp16 --context 128 --depth 0.5 --trials 1",
    ],
)
def test_nan_logits_give_an_error_and_no_result(command, wide, tmp_path, capsys):
    """A result file would hold NaN, which JSON does not have, and meaningless figures."""
    result = tmp_path / "result.json"
    words = f"--model {wide} --json {result} --dtype".split()
    assert main([*command.split(), *words, "float16"]) == 1
    assert_names(capsys.readouterr().err, str(wide), "NaN or infinity", "torch.float16", "--dtype float32")
    assert not result.exists()
    assert main([*command.split(), *words, "float32"]) == 0 and "NaN" not in result.read_text()


@pytest.mark.model
@pytest.mark.parametrize(("kv", "bound"), [("int8", 1e-4), ("int4", 2e-3)])
def test_quantized_kv_equals_torch_quantizing_every_k_and_v(kv, bound):
    """Most tokens agree far better than the bound.

    A code on an edge may round the other way in another order of summation, and later values then differ.
    Weights changed by a millionth move int4's perplexity of these windows by up to 0.2 %, of the 0.6 % that
    it costs.
    """
    text, seqlen, count = load_text("pydoc"), 256, 6
    llm, plain = (LLM("tiny", kv=some, max_model_len=seqlen, **SETTINGS) for some in (kv, "fp16"))
    stored = llm.engine.runner.kv
    tables = [stored.layer(i).smoothing for i in range(len(stored))]
    theirs = quantized_model(model_path("tiny"), int(kv[3:]), tables)
    windows = PROTOCOLS["gptq"].windows(text, llm.tokenizer, seqlen, None, count)
    ids = torch.tensor([window.ids for window in windows])
    with torch.no_grad():
        logp = theirs(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ours, unquantized = (torch.stack(some.score(ids.tolist())) for some in (llm, plain))
    assert quick_perplexity(llm, text, seqlen, count).ppl == pytest.approx(math.exp(-logp.mean()), rel=bound)
    cost, error = (unquantized - logp).abs(), (ours - logp).abs()
    assert error.median() < cost.median() / 5 and cost.median() > 2e-3


@pytest.mark.model
def test_quantized_kv_keeps_the_promised_perplexity():
    values, text = {}, load_text("pydoc")
    for kv in ("fp16", "int8", "int4"):
        llm = LLM("tiny", kv=kv, **SETTINGS)
        # of 16,000 tokens, on which int4 costs 1.2 %; neighbouring windows are alike and may cost 1.8 %
        windows = PROTOCOLS["gptq"].windows(text, llm.tokenizer, 512, None, 32)[::4]
        values[kv] = perplexity(llm, "gptq", windows, 512, text).ppl
    change = {kv: abs(value / values["fp16"] - 1) for kv, value in values.items()}
    assert 0 < change["int8"] < 0.001
    assert change["int8"] < change["int4"] < 0.015


@pytest.mark.model
@pytest.mark.parametrize(
    # another chunk size sums in another order, so in int8 a code on an edge may round the other way
    ("kv", "bound"),
    [("fp16", 1e-6), ("int8", 1e-4)],
)
def test_chunking_and_batching_do_not_change_perplexity(kv, bound):
    whole = LLM("tiny", kv=kv, **SETTINGS)
    chunked = LLM("tiny", kv=kv, **SETTINGS, max_num_seqs=1, max_num_batched_tokens=100)
    first, second = (quick_perplexity(llm, load_text("pydoc"), 256, 3).ppl for llm in (whole, chunked))
    assert first == pytest.approx(second, rel=bound)


@pytest.mark.model
def test_command_writes_json(tmp_path, capsys):
    out = tmp_path / "r.json"
    words = f"ppl pydoc --model tiny --kv int8 --baseline tiny --seqlen 256 --limit 2 --json {out}".split()
    assert main(words) == 0
    result = checked(out)
    assert result["dataset"] == "pydoc" and result["protocol"] == "gptq" and result["kv"] == "int8"
    assert result["tokens"] == 2 * 255 and result["seconds"] > 0 and len(result["windows_nll"]) == 2
    assert result["baseline"]["kv"] == "fp16"
    assert 0 < abs(result["ppl"] / result["baseline"]["ppl"] - 1) < 0.01
    shown = capsys.readouterr().out
    assert "int8" in shown and f"{result['ppl']:.4f}" in shown and "protocol gptq" in shown
    assert not (tmp_path / "r.json.partial").exists()


@pytest.mark.model
def test_models_with_different_contexts_share_their_windows(tmp_path):
    short, out = shorter_context(tmp_path / "short"), tmp_path / "r.json"
    for pair in ("--model tiny --baseline {}", "--model {} --baseline tiny"):
        assert main(f"ppl pydoc {pair.format(short)} --limit 1 --json {out}".split()) == 0
        result = json.loads(out.read_text())
        assert result["seqlen"] == result["baseline"]["seqlen"] == 64


@pytest.mark.model
def test_interrupted_run_resumes(tmp_path, capsys, monkeypatch):
    out = tmp_path / "r.json"
    words = f"ppl pydoc --model tiny --seqlen 64 --limit 6 --batch 2 --json {out}".split()
    calls, score = [], module.score

    def interrupted(llm, windows):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(windows))
        return score(llm, windows)

    monkeypatch.setattr(module, "score", interrupted)
    assert main(words) == 130 and not out.exists()
    partial = tmp_path / "r.json.partial"
    partial.write_text(partial.read_text() + '{"run": "cut o')  # an unfinished last line
    monkeypatch.setattr(
        module, "score", lambda llm, windows: calls.append(len(windows)) or score(llm, windows)
    )
    assert main(words) == 0
    assert calls == [2, 2, 2] and "4 of 6 windows" in capsys.readouterr().err
    resumed = json.loads(out.read_text())
    assert resumed["resumed_windows"] == 4 and not partial.exists()
    assert main([*words[:-1], str(tmp_path / "whole.json")]) == 0
    assert resumed["ppl"] == json.loads((tmp_path / "whole.json").read_text())["ppl"]


def test_resume_ignores_other_runs(tmp_path):
    partial = PartialResult(tmp_path / "r.json")
    partial.add({"kv": "int8"}, {0: {"nll": 1.0}})
    partial.add({"kv": "int4"}, {0: {"nll": 2.0}, 3: {"nll": 3.0}})
    assert partial.load({"kv": "int4"}) == {0: {"nll": 2.0}, 3: {"nll": 3.0}}
    assert partial.load({"kv": "fp16"}) == {}
    partial.remove()
    assert partial.load({"kv": "int4"}) == {}


def test_resume_ignores_other_windows(tmp_path):
    """Two short documents are cut alike by any --seqlen; only what follows them differs."""
    for name, words in (("a", 5), ("b", 7), ("c", 90)):
        (tmp_path / f"{name}.txt").write_text("some words " * words)
    text, tokenizer = load_text(str(tmp_path)), Tokenizer("tiny")
    cut = PROTOCOLS["lmeval"].windows
    short, long, again = (cut(text, tokenizer, seqlen, None, None) for seqlen in (32, 64, 32))
    assert short[:2] == long[:2]
    assert cut_of(short) == cut_of(again) != cut_of(long)
    strides = [PROTOCOLS["sliding"].windows(text, tokenizer, 64, stride, None) for stride in (16, 32)]
    assert cut_of(strides[0]) != cut_of(strides[1])


@pytest.mark.model
def test_overflowing_word_perplexity_is_infinite(tmp_path, capsys):
    """A text without spaces is a single word; its loss is that of all its tokens."""
    (tmp_path / "a.txt").write_text("".join(str(number) for number in range(400)))
    words = (
        f"ppl {tmp_path / 'a.txt'} --model tiny --protocol lmeval --seqlen 128 --json {tmp_path / 'r.json'}"
    )
    assert main(words.split()) == 0
    result = checked(tmp_path / "r.json")
    assert "word_perplexity" not in result and 1 < result["ppl"] < math.inf
    assert result["bits_per_byte"] == pytest.approx(math.log2(result["byte_perplexity"]))
    assert "inf" in capsys.readouterr().out


@pytest.mark.model
def test_different_tokenizers_show_bits_per_byte(tmp_path, capsys):
    """A model with other tokens for the same text gets no change of perplexity."""
    other = fewer_merges(tmp_path / "other")
    words = f"ppl pydoc --model {other} --baseline tiny --seqlen 64 --limit 3".split()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert_names(shown, "tokenizers differ", "bits per byte", "%")


def test_module_runs_as_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cli.py", "ppl", "pydoc", "--model", "tiny", "--seqlen", "9999"])
    monkeypatch.delitem(sys.modules, "qrt_eval.cli")
    with pytest.raises(SystemExit, match="1"):
        runpy.run_module("qrt_eval.cli", run_name="__main__")
    assert_names(capsys.readouterr().err, "error:", "--seqlen", "9999", "2048", "tiny")


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ("ppl pydoc --model /no/such/model", 1, ["/no/such/model"]),
        ("ppl nothing.txt --model tiny", 1, ["nothing.txt"]),
        ("ppl pydoc --model tiny --kv int5", 2, ["--kv", "int5"]),
        ("ppl pydoc --model tiny --sqlen 3", 2, ["--sqlen", "--seqlen"]),
        ("ppl pydoc --model tiny --protocol gtpq", 2, ["--protocol", "gtpq"]),
        ("ppl pydoc --model tiny --seqlen 9999", 1, ["--seqlen", "9999", "2048", "tiny"]),
        ("ppl pydoc --model tiny --protocol lmeval --seqlen 2049", 1, ["--seqlen", "2049", "2048"]),
        ("ppl pydoc --model tiny --seqlen 1", 1, ["--seqlen", "2 to 2048", "got 1"]),
        ("ppl pydoc --model tiny --seqlen 0", 2, ["--seqlen", "'0'", "at least 1"]),
        ("ppl pydoc --model tiny --protocol llamacpp --seqlen 2", 1, ["--seqlen", "4 to 2048", "got 2"]),
        ("ppl pydoc --model tiny --protocol sliding --stride 2048", 1, ["--stride", "1 to 2047", "got 2048"]),
        ("ppl pydoc --model tiny --protocol sliding --stride 0", 2, ["--stride", "'0'"]),
        ("ppl pydoc --model tiny --stride 5", 1, ["--stride", "sliding", "gptq"]),
        ("ppl pydoc --model tiny --limit 0", 2, ["--limit", "'0'", "at least 1"]),
        ("ppl pydoc --model tiny --batch 0", 2, ["--batch", "at least 1"]),
        ("kld pydoc --model tiny --chunk 0", 2, ["--chunk", "at least 1"]),
        ("kld --model tiny", 1, ["--base-file", "text"]),
        ("kld pydoc --model tiny --top-p 1.5", 2, ["--top-p", "'1.5'", "at most 1"]),
        ("kld --model tiny --base-file /no/file", 1, ["--base-file", "/no/file", "--save-base"]),
        ("kld pydoc --model tiny --base-file f", 1, ["dataset", "--base-file", "pydoc"]),
        ("kld --model tiny --base-file f --protocol gptq", 1, ["--protocol", "--base-file"]),
        ("kld --model tiny --base-file f --seqlen 64", 1, ["--seqlen", "--base-file"]),
        ("kld --model tiny --base-file f --limit 1", 1, ["--limit", "--base-file"]),
        ("kld --model tiny --base-file f --baseline-kv int4", 1, ["--baseline-kv", "--base-file"]),
        ("latency --shape llama-9", 2, ["llama-9", "llama-3-8b"]),
    ],
)
def test_bad_input_gives_one_line(words, code, named, capsys):
    try:
        got = main(words.split())
    except SystemExit as exit:
        got = exit.code
    assert got == code
    assert_error(capsys.readouterr().err, *named)
