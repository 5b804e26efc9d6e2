"""`qrt-eval ppl`: the gptq protocol against transformers, KV that is really quantized, bad input."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qrt import LLM
from qrt.assets import model_path
from qrt.errors import ConfigError
from qrt_eval.cli import main
from qrt_eval.ppl import gptq_perplexity, gptq_windows
from qrt_eval.text import load_text

SEQLEN, LIMIT = 512, 4


def test_windows_do_not_overlap_and_drop_the_tail():
    assert gptq_windows(list(range(11)), 4, None) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert gptq_windows(list(range(11)), 4, 1) == [[0, 1, 2, 3]]
    with pytest.raises(ConfigError, match="11 tokens"):
        gptq_windows(list(range(11)), 12, None)


def by_transformers() -> float:
    """GPTQ's evaluation loop, written with transformers alone."""
    folder = model_path("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(load_text("pydoc").text, return_tensors="pt").input_ids
    losses = []
    for i in range(LIMIT):
        window = ids[:, i * SEQLEN : (i + 1) * SEQLEN]
        with torch.no_grad():
            losses.append(model(window, labels=window).loss.double())
    return math.exp(torch.stack(losses).mean())


@pytest.mark.model
def test_equals_transformers():
    llm = LLM("tiny", attend_cache=True, enable_prefix_caching=False)
    ours = gptq_perplexity(llm, load_text("pydoc"), SEQLEN, LIMIT)
    assert ours.tokens == LIMIT * (SEQLEN - 1)
    assert ours.ppl == pytest.approx(by_transformers(), rel=1e-4)


@pytest.mark.model
def test_quantized_kv_is_read_back():
    values = {}
    for kv in ("fp16", "int8", "int4"):
        llm = LLM("tiny", kv=kv, attend_cache=True, enable_prefix_caching=False)
        # 16,000 tokens: int4's cost is 1.2 % of any such sample, and anything up to 1.8 of an eighth of it
        values[kv] = gptq_perplexity(llm, load_text("pydoc"), SEQLEN, 32).ppl
    change = {kv: abs(value / values["fp16"] - 1) for kv, value in values.items()}
    assert 0 < change["int8"] < 0.001
    assert change["int8"] < change["int4"] < 0.015


@pytest.mark.model
@pytest.mark.parametrize(
    # another chunk size is another order of summation: in int8 a code on an edge may then round the other way
    ("kv", "bound"),
    [("fp16", 1e-6), ("int8", 1e-4)],
)
def test_chunked_prefill_and_batching_do_not_change_it(kv, bound):
    settings = {"kv": kv, "attend_cache": True, "enable_prefix_caching": False}
    whole = LLM("tiny", **settings)
    chunked = LLM("tiny", **settings, max_num_seqs=1, max_num_batched_tokens=100)
    first, second = (gptq_perplexity(llm, load_text("pydoc"), 256, 3).ppl for llm in (whole, chunked))
    assert first == pytest.approx(second, rel=bound)


@pytest.mark.model
def test_command_writes_json(tmp_path, capsys):
    out = tmp_path / "r.json"
    words = f"ppl pydoc --model tiny --kv int8 --baseline tiny --seqlen 256 --limit 2 --json {out}".split()
    assert main(words) == 0
    result = json.loads(out.read_text())
    assert result["dataset"] == "pydoc" and result["protocol"] == "gptq" and result["kv"] == "int8"
    assert result["tokens"] == 2 * 255 and result["seconds"] > 0
    assert 0 < abs(result["ppl"] / result["baseline_ppl"] - 1) < 0.01
    assert "int8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("ppl pydoc --model /no/such/model", 1, "/no/such/model"),
        ("ppl nothing.txt --model tiny", 1, "nothing.txt"),
        ("ppl pydoc --model tiny --kv int5", 2, "int5"),
        ("ppl pydoc --model tiny --sqlen 3", 2, "did you mean '--seqlen'"),
        ("latency --shape llama-9", 1, "llama-3-8b"),
    ],
)
def test_bad_input_is_one_line(words, code, message, capsys):
    try:
        got = main(words.split())
    except SystemExit as exit:
        got = exit.code
    error = capsys.readouterr().err
    assert got == code and message in error and "Traceback" not in error
