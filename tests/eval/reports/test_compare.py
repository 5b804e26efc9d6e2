"""Test `qrt-eval compare`: noise from what the files hold, and files that do not compare."""

import json
import math

import pytest

from errors import assert_error
from qrt_eval.cli import main
from qrt_eval.reports.compare import METRICS, compare, kind, load, settings

# Every figure of a kind of file, and whether more of it is better.
BETTER = {
    "ppl": {"ppl": False},
    "kld": {"KL": False, "same top-1": True, "ln ppl ratio": False},
    "answers": {"changed answers": False},
    "throughput": {"tokens/s": True},
    "latency": {"decode ms/step": False, "prefill tokens/s": True},
    "serve": {"mean_ttft_ms": False, "mean_tpot_ms": False, "mean_itl_ms": False, "mean_e2el_ms": False,
              "request_throughput": True, "output_throughput": True},
    "kernels": {"us": False},
    "sweep": {"ppl": False, "kl_mean": False, "tokens_per_second": True},
    "kv-error": {"relative error": False},
    "grammar": {"compile_ms": False, "mask_us": False, "accept_us": False, "refused schemas": False},
}  # fmt: skip
WHERE = {"device": "d", "cuda": None, "python": "3", "versions": {"torch": "1"}, "commit": "a"}


def ppl(value, losses, **other):
    facts = {"command": "ppl", "dataset": "t", "text_sha256": "0", "protocol": "gptq", "seqlen": 8}
    return {**facts, "ppl": value, "stderr": 1.0, "windows_nll": losses, "environment": WHERE, **other}


def throughput(*repeats):
    rows = [{"batch": 4, "tokens_per_second": repeats[0], "repeats": list(repeats)}]
    return {"command": "throughput", "batches": rows, "environment": WHERE}


def test_perplexities_compare_window_by_window():
    """Windows differ by 1.0, the models by 0.01 in each: far below the text's noise, above their own."""
    before, after = ppl(10.0, [2.0, 3.0, 1.0]), ppl(10.1, [2.010, 3.011, 1.009])
    (change,) = compare(before, after, 2)
    assert change.verdict == "worse" and not change.assumed
    assert change.noise == pytest.approx(10.1 * 0.001 / 3**0.5)
    (change,) = compare(before, ppl(10.1, [2.3, 2.7, 1.03]), 2)
    assert change.verdict == "same"
    (change,) = compare(before, ppl(9.0, [2.0, 3.0]), 2)  # other windows: each side's own error
    assert change.verdict == "same" and change.noise == pytest.approx(2**0.5)
    (change,) = compare(ppl(10.0, [2.0]), ppl(9.0, [2.1]), 2)  # one window has no spread
    assert change.noise == pytest.approx(2**0.5)


def test_different_tokenizers_compare_by_bits_per_byte(tmp_path, capsys):
    """Fewer, longer tokens give a better model a higher perplexity."""
    before = ppl(10.0, [2.0, 3.0, 1.0], bits_per_byte=1.0, stderr=0.1, tokenizer_sha256="a")
    after = ppl(20.0, [2.9, 3.9, 1.9], bits_per_byte=0.9, stderr=0.2, tokenizer_sha256="b")
    (change,) = compare(before, after, 2)
    assert (change.name, change.before, change.after) == ("bits per byte", 1.0, 0.9)
    errors = 1.0 * 0.01 / math.log(10), 0.9 * 0.01 / math.log(20)  # of ln ppl: 1 % of ppl
    assert change.verdict == "better" and change.noise == pytest.approx(math.hypot(*errors))
    for name, result in (("a", before), ("b", after)):
        (tmp_path / name).write_text(json.dumps(result))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "tokenizer_sha256: a -> b" in said
    assert "tokenizers differ" in said and "bits per byte" in said
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "tokenizers differ" not in capsys.readouterr().out
    (change,) = compare(before, {**after, "tokenizer_sha256": None}, 2)  # not known to differ
    assert change.name == "ppl"


def test_timings_compare_by_their_repeats():
    (change,) = compare(throughput(100, 101, 99), throughput(110, 111, 109), 2)
    assert change.verdict == "better" and change.noise == pytest.approx((2 / 3) ** 0.5)
    (change,) = compare(throughput(100, 130, 70), throughput(110, 140, 80), 2)
    assert change.verdict == "same"
    (change,) = compare(throughput(100), throughput(104), 2)
    assert change.assumed and change.verdict == "same"
    (change,) = compare(throughput(100), throughput(80), 2)
    assert change.verdict == "worse"


def test_steady_window_rate_comes_first():
    def loads(whole, steady):
        window = {"output_tokens_per_second": steady}
        rows = [
            {"lengths": {"name": "9/6"}, "output_tokens_per_second": whole, "window": window, "repeats": [1]}
        ]
        rows += [{**rows[0], "lengths": {"name": "sharegpt"}, "window": None}]
        return {"command": "throughput", "loads": rows, "environment": WHERE}

    fixed, sharegpt = compare(loads(100, 150), loads(200, 100), 2)
    assert (fixed.name, fixed.verdict) == ("9/6: output tokens/s", "worse")
    assert (sharegpt.name, sharegpt.verdict) == ("sharegpt: output tokens/s", "better")


def test_passkey_noise_depends_on_the_trials():
    """Of 4 trials, a half has a standard error of a quarter: 2 to 1 is no change, 0 to 4 is one."""

    def cells(retrieved):
        cell = {"kv": "int4", "context_tokens": 512, "depth": 0.5, "trials": 4, "retrieved": retrieved}
        return {"command": "passkey", "cells": [{**cell, "chosen": 0.5}]}

    found, chosen = compare(cells(0.5), cells(0.25), 2)
    assert found.verdict == chosen.verdict == "same" and not found.assumed
    assert found.noise == pytest.approx((1 / 16 + 3 / 64) ** 0.5)
    assert [change.verdict for change in compare(cells(0.0), cells(1.0), 2)] == ["better", "same"]


def test_changed_settings_are_printed():
    before = ppl(1, [], kv="int8", arguments={"kv": "int8", "limit": 3})
    after = ppl(1, [], kv="int4", arguments={"kv": "int4", "limit": 4})
    after["environment"] = {**WHERE, "versions": {"torch": "2"}}
    assert list(settings(before, after)) == [
        ("kv", "int8", "int4"), ("limit", 3, 4), ("versions torch", "1", "2")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text_sha256": "1"}, ["text_sha256"]),
        ({"protocol": "llamacpp"}, ["protocol", "llamacpp"]),
        ({"arguments": {"stride": 5}}, ["stride", "None and 5"]),
        ({"command": "throughput", "batches": []}, ["throughput", "ppl"]),
    ],
)
def test_incomparable_results_are_refused(change, named, tmp_path, capsys):
    (tmp_path / "a").write_text(json.dumps(ppl(1, [])))
    (tmp_path / "b").write_text(json.dumps(ppl(1, []) | change))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert_error(capsys.readouterr().err, "compare", *named)


def test_default_stride_differs_from_a_given_one(tmp_path, capsys):
    sliding = ppl(1, [], protocol="sliding")  # windows of 8: new tokens are 7 by default
    for name, arguments in (("a", {}), ("b", {"stride": None}), ("c", {"stride": 7}), ("d", {"stride": 4})):
        (tmp_path / name).write_text(json.dumps({**sliding, "arguments": arguments}))
    for name in "bc":
        assert main(["compare", str(tmp_path / "a"), str(tmp_path / name)]) == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "d")]) == 1
    assert_error(capsys.readouterr().err, "stride", "7 and 4")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"a": 1}',
        '{"environment": {}, "command": "nothing"}',
        '{"environment": {}, "command": "ppl"}',
        '{"environment": {}, "ppl": null}',
        '{"environment": {}, "command": "kld"}',
        '{"environment": {}, "command": "sweep", "cells": [{"weights": "fp16"}]}',
        '{"environment": {}, "rows": null}',
    ],
)
def test_files_that_are_no_results_are_refused(content, tmp_path, capsys):
    (tmp_path / "a").write_text(content)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 1
    assert_error(capsys.readouterr().err, str(tmp_path / "a"), "expected")


def test_recorded_results_compare_with_themselves(capsys):
    """This covers files with and without the name of their command."""
    from pathlib import Path

    recorded = sorted((Path(__file__).parents[3] / "eval/results").rglob("*.json"))
    others = ("calibration_", "grammar_answers", "steps_", "storm", "tests")  # not qrt-eval's
    files = [file for file in recorded if not file.name.startswith(others)]
    for file in files:
        result = load(str(file))
        changes = compare(result, result, 2)
        assert changes and all(change.verdict == "same" for change in changes), file
        metrics, wanted = METRICS[kind(result)](result), BETTER[kind(result)]
        if "loads" in result:
            wanted = {"output tokens/s": True}
        found = {name.rsplit(": ")[-1]: metric.more_is_better for name, metric in metrics.items()}
        assert found == {name: wanted[name] for name in (found if kind(result) == "sweep" else wanted)}, file
    assert main(["compare", str(file), str(file)]) == 0
    shown = capsys.readouterr().out
    assert all(change.name in shown for change in changes) and "0 better, 0 worse" in shown
