"""Test `qrt-eval latency` on a small shape: its rows, and those of transformers."""

from itertools import combinations

import pytest
import torch

from errors import assert_error, assert_names
from qrt.arch.read import read_arch
from qrt.model.fused import FusedDecoder
from qrt.model.random import random_model
from qrt_eval.cli import main
from qrt_eval.reports.tables import latencies
from qrt_eval.speed import latency, transformers_latency
from qrt_eval.speed.latency import weight_bytes
from result_schema import checked


@pytest.fixture(autouse=True)
def small(small_shape):
    """Know the small shape in every test."""


def test_compare_has_rows_of_qrt_and_transformers(tmp_path):
    file = tmp_path / "out.json"
    words = (
        f"latency --shape small --kv int8 --batch 1 2 --input-len 7 --output-len 4 --compare --json {file}"
    )
    assert main(words.split()) == 0
    result = checked(file)
    assert (result["model"], result["weights"], result["kv"]) == ("small", "w4a16", "int8")
    ours, theirs = result["rows"][:2], result["rows"][2:]
    assert [row["batch"] for row in ours] == [row["batch"] for row in theirs] == [1, 2]
    assert all("by" not in row for row in ours) and all(row["by"] == "transformers" for row in theirs)
    read = "weight_bytes_per_step", "kv_bytes_per_step"
    bandwidth = sum(ours[0][key] for key in read) / ours[0]["floor_ms"]
    for row in result["rows"]:
        assert 0 < row["decode_ms_per_step"] <= row["decode_ms_p99"]
        assert row["prefill_tokens_per_s"] == pytest.approx(row["batch"] * 7 / row["time_to_first_tokens_s"])
        assert row["decode_tokens_per_s"] == pytest.approx(row["batch"] / row["decode_ms_per_step"] * 1e3)
        assert sum(row[key] for key in read) / row["floor_ms"] == pytest.approx(bandwidth)
    weights = 2 * (2 * (128 * 256 + 128 * 128 + 3 * 128 * 256) + 128 * 128)
    assert {row["weight_bytes_per_step"] for row in theirs} == {weights}
    assert {row["weight_bytes_per_step"] for row in ours} < set(range(weights))
    assert [row["kv_bytes_per_step"] for row in theirs] == [n * 9 * 2 * 2 * 32 * 2 * 2 for n in (1, 2)]


@pytest.mark.slow
def test_ranks_are_timed_and_named(tmp_path):
    file = tmp_path / "out.json"
    words = f"latency --shape small --kv int8 --batch 1 --input-len 7 --output-len 4 -tp 2 --json {file}"
    assert main(words.split()) == 0
    result = checked(file)
    weights = 2 * (128 * 256 + 128 * 128 + 3 * 128 * 256) // 2 + 128 * 128
    assert result["rows"][0]["weight_bytes_per_step"] < 2 * weights
    assert "| small w4a16, 2 GPUs | int8 |" in latencies([result])


def test_one_slow_step_of_a_hundred_is_not_the_99th_percentile():
    row = latency.summary(4, 8, 101, 0.5, [0.010] * 99 + [1.0])
    assert row["decode_ms_per_step"] == pytest.approx(10) and row["decode_tokens_per_s"] == pytest.approx(400)
    assert row["decode_ms_p99"] == pytest.approx(10 + 0.01 * 990)  # as numpy and qrt-eval serve compute it


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_failed_step_gives_an_error(command, monkeypatch, capsys):
    def fail(self, step, kv):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(FusedDecoder, "hidden", fail)
    assert main([command, "--shape", "small", "--batch", "2", "--input-len", "7", "--output-len", "4"]) == 1
    assert_names(capsys.readouterr().err, "error: ", "RuntimeError: no such kernel")


def test_a_quantized_head_is_read_and_named(tmp_path, capsys):
    words = "latency --shape small --weights w8a8 --input-len 7 --output-len 4 --compare --json"
    results = {}
    for bits in ([], ["--head-bits", "8"]):
        assert main([*words.split(), str(tmp_path / f"{len(bits)}.json"), *bits]) == 0
        results[len(bits)] = checked(tmp_path / f"{len(bits)}.json")
    plain, quantized = results[0], results[2]
    assert (plain["weights"], quantized["weights"]) == ("w8a8", "w8a8, head w8a8")
    assert (plain["arguments"]["head_bits"], quantized["arguments"]["head_bits"]) == (None, 8)
    saved, of_transformers = (
        plain["rows"][row]["weight_bytes_per_step"] - quantized["rows"][row]["weight_bytes_per_step"]
        for row in (0, 1)
    )
    assert saved == 128 * 128 * (2 - 1) - 128 * (4 + 4) and of_transformers == 0  # scales and counters
    assert "small w8a8, head of 8 bits" in capsys.readouterr().out
    lines = latencies([quantized]).splitlines()[2:]
    assert lines[0].startswith("| small w8a8, head w8a8 |")
    assert lines[1].startswith("| small bf16, transformers |")


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_shape_flags_are_refused_beside_a_checkpoint(command, capsys):
    assert main([command, "--model", "tiny", "--head-bits", "8"]) == 1
    assert_error(capsys.readouterr().err, "--head-bits", "--shape", "checkpoint")
    assert main([command, "--model", "tiny", "--weights", "w8a8"]) == 1
    assert_error(capsys.readouterr().err, "--weights", "--shape", "checkpoint")


def test_transformers_model_has_the_same_shape_in_bf16():
    model = transformers_latency.random_transformer("small", torch.device("cpu"))
    assert model.dtype == torch.bfloat16 and model.config.num_key_value_heads == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_comparing_needs_a_shape(capsys):
    assert main(["latency", "--model", "tiny", "--compare"]) == 1
    assert_error(capsys.readouterr().err, "--compare", "--shape", "--model")


def test_a_step_reads_the_experts_that_its_tokens_choose():
    """One token reads its own; of two tokens the second chooses some that the first did not."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2}
    arch = read_arch({"architectures": ["Qwen3MoeForCausalLM"], **sizes, "hidden_size": 64}, "x")
    model = random_model(arch, "fp16", device=torch.device("cpu"), dtype=torch.float32)
    expert = 3 * 64 * 768 * 4
    dense = weight_bytes(model, 1) - 2 * expert
    chosen = [len({*a, *b}) for a in combinations(range(8), 2) for b in combinations(range(8), 2)]
    assert weight_bytes(model, 2) == pytest.approx(dense + sum(chosen) / len(chosen) * expert)
