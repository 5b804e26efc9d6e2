"""Test `qrt-eval throughput`: its counts, and its tables."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from errors import assert_error
from qrt_eval.cli import main, parser
from qrt_eval.speed import throughput
from result_schema import checked

README = Path(__file__).parents[3] / "README.md"


@pytest.mark.model
def test_batch_rows_count_tokens_and_requests(tmp_path):
    out = tmp_path / "t.json"
    words = "throughput --model tiny --kv int8 --batch 1 3 --num-prompts 4 --input-len 9 --output-len 5"
    assert main([*words.split(), "--repeats", "2", "--json", str(out)]) == 0
    result = checked(out)
    assert [row["batch"] for row in result["batches"]] == [1, 3] and result["kv"] == "int8"
    for row in result["batches"]:
        assert row["num_requests"] == 4 and row["total_num_tokens"] == 4 * (9 + 5)
        assert row["tokens_per_second"] == pytest.approx(56 / row["elapsed_time"])
        assert row["output_tokens_per_second"] == pytest.approx(20 / row["elapsed_time"])
        assert len(row["repeats"]) == 2 and row["tokens_per_second"] in row["repeats"]
        assert row["requests_per_second"] == pytest.approx(4 / row["elapsed_time"])
        assert row["host_gap"] is None or 0 <= row["host_gap"] < 1
    # one after the other; each prompt takes five steps, which read all weights and the K/V they attend to
    weights = (2 if torch.cuda.is_available() else 4) * (
        6 * (512 * 256 + 256 * 256 + 3 * 768 * 256) + 4096 * 256
    )
    read = 20 * weights + 4 * (9 + 10 + 11 + 12 + 13) * 6 * 2 * (2 * 64 + 8)
    one = result["batches"][0]
    assert one["achieved_GBps"] == pytest.approx(read / one["elapsed_time"] / 1e9)


@pytest.mark.model
def test_lengths_have_a_row_each(tmp_path, capsys):
    """Fixed lengths have a window, in which as many requests begin as end; a file's rows are as given."""
    out, file = tmp_path / "t.json", tmp_path / "lengths.jsonl"
    file.write_text('{"input_len": 4, "output_len": 2}\n{"input_len": 8, "output_len": 3}\n')
    words = f"throughput --model tiny --max-num-seqs 3 --lengths 9/6,5/4 {file} --json {out}"
    assert main(words.split()) == 0
    result = checked(out)
    assert (result["max_num_seqs"], result["max_model_len"]) == (3, 15)
    assert result["max_num_batched_tokens"] == 8192
    for row, (inputs, outputs) in zip(result["loads"][:2], ((9, 6), (5, 4)), strict=True):
        lengths, window = row["lengths"], row["window"]
        assert (lengths["distribution"], lengths["input_len"], lengths["output_len"]) == (
            "fixed",
            inputs,
            outputs,
        )
        assert (lengths["mean_input_len"], lengths["mean_output_len"]) == (inputs, outputs)
        assert row["num_requests"] == 9 and row["running"] == window["first"] == 3
        assert 6 <= row["finished"] < 9, "the last ones are dropped when none waits"
        assert 6 * (inputs + outputs) <= row["total_num_tokens"] < 9 * (inputs + outputs)
        assert window["started"] == 6 and window["output_tokens"] == pytest.approx(
            6 * outputs, abs=2 * outputs
        )
        assert row["repeats"] == [window["output_tokens_per_second"]]
        assert window["output_tokens_per_second"] == window["output_tokens"] / window["seconds"]
        assert row["output_tokens_per_second"] * row["elapsed_time"] < 9 * outputs
    row = result["loads"][2]
    assert row["lengths"]["name"] == str(file) and row["num_requests"] == 2 and row["window"] is None
    assert row["total_num_tokens"] == 4 + 2 + 8 + 3
    assert row["output_tokens_per_second"] == pytest.approx(5 / row["elapsed_time"])
    shown = capsys.readouterr().out
    assert "9/6" in shown and "5/4" in shown and "running" in shown


@pytest.mark.model
def test_interrupted_run_keeps_finished_loads(tmp_path, monkeypatch):
    """Ten loads take a quarter of an hour, and a machine may be taken away before."""
    out, measure = tmp_path / "t.json", throughput.measure

    def cut(engine, load, repeats):
        if load.about["lengths"]["name"] == "5/4":
            raise KeyboardInterrupt
        return measure(engine, load, repeats)

    monkeypatch.setattr(throughput, "measure", cut)
    words = f"throughput --model tiny --max-num-seqs 3 --lengths 9/6,5/4 --json {out}"
    with suppress(KeyboardInterrupt):
        assert main(words.split())
    assert [row["lengths"]["name"] for row in checked(out)["loads"]] == ["9/6"]


@pytest.mark.model
def test_prompts_of_a_file_come_all_at_once(tmp_path):
    out, file = tmp_path / "t.json", tmp_path / "prompts.txt"
    file.write_text("one line\nand another\n")
    words = (
        f"throughput --model tiny --lengths {file} --output-len 3 --num-prompts 5 --no-window --json {out}"
    )
    assert main(words.split()) == 0
    (row,) = checked(out)["loads"]
    assert row["lengths"]["distribution"] == "prompts" and row["lengths"]["rows"] == 2
    assert row["finished"] == row["num_requests"] == 5 and row["lengths"]["mean_output_len"] == 3


def test_steps_are_shown_by_kind(capsys):
    kind = {"prompts": True, "recorded": False, "count": 221, "share": 0.6, "ms": 52.5, "wait_ms": 0.25,
            "host_ms": 48.0, "decodes": 248.0, "prompt_tokens": 818.0}  # fmt: skip
    row = {"lengths": {"name": "sharegpt"}, "num_requests": 1000, "running": 256, "window": None,
           "output_tokens_per_second": 12105.0, "tokens_per_second": 25000.0, "requests_per_second": 60.0,
           "repeats": [12105.0], "host_gap": 0.031, "steps": [kind]}  # fmt: skip
    asked = parser().parse_args(["throughput", "--shape", "llama-3-8b", "--lengths", "sharegpt"])
    asked.weights = "w8a8"
    throughput.print_tables(asked, [row])
    shown = capsys.readouterr().out
    assert "12,105.0" in shown and "3.1 %" in shown
    (line,) = [line for line in shown.splitlines() if "with prompts, launched" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")[1:]] == [
        "221", "60.0 %", "52.50", "0.25", "48.00", "248.0", "818.0"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words, named",
    [
        ("--shape llama-3-8b --prompts x", ["--prompts", "--model", "--shape"]),
        (f"--shape llama-3-8b --lengths {README}", ["--lengths", "--model", "--shape"]),
        ("--model tiny --lengths 9/6 --batch 3", ["--batch", "--lengths", "both"]),
        ("--model tiny --lengths 9/6 --output-len 3", ["--output-len", "prompts", "--lengths"]),
        ("--model tiny --window", ["--window", "--lengths"]),
        ("--model tiny --window-seconds 3", ["--window-seconds", "--lengths"]),
        ("--model tiny --lengths 9/6 --max-model-len 14", ["--max-model-len", "at least 15", "got 14"]),
        ("--model tiny --lengths 9/6 --num-prompts 7 --max-num-seqs 4", ["at least 8", "9/6", "got 7"]),
        ("--model tiny --lengths 2000/49", ["--lengths 2000/49", "2049", "2048", "tiny"]),
    ],
)
def test_conflicting_flags_are_refused(words, named, capsys):
    assert main(["throughput", *words.split()]) == 1
    assert_error(capsys.readouterr().err, *named)


@pytest.mark.parametrize(
    "words",
    [
        "throughput --batch 4 0",
        "throughput --repeats 0",
        "throughput --num-prompts 0",
        "throughput --num-prompts -1",
        "throughput --input-len -5",
        "throughput --output-len 0",
        "latency --batch 0",
        "latency --input-len 0",
        "latency --output-len -1",
        "serve --num-prompts 0",
        "serve --max-concurrency 0",
        "serve --processes 0",
        "kv-error --num-heads 0",
        "kv-error --num-kv-heads 0",
        "kv-error --head-dim 0",
    ],
)
def test_counts_below_one_are_refused(words, capsys):
    command, flag, *values = words.split()
    with pytest.raises(SystemExit, match="2"):
        main([command, flag, *values])
    assert_error(capsys.readouterr().err, flag, f"'{values[-1]}'", "integer", "at least 1")
