"""README and docs/benchmarks.md show what eval/results hold, and the tables are computed rightly."""

import json
from pathlib import Path

from errors import assert_error
from qrt_eval.reports import tables

ROOT = Path(__file__).parents[3]
PREFIXES = (
    "| model | KV | lengths", "| in/out", "| steps of sharegpt", "| model | KV | batch x prompt",
    "| linear, us", "| decode, us", "| llama-3-8b, weights",
)  # fmt: skip


def test_pages_show_the_recorded_results():
    """All tables stand beside the results, some in docs/benchmarks.md: of the H200 six, of the H100 two."""
    recorded = tables.report(ROOT / "eval" / "results")
    assert recorded in (ROOT / "eval" / "results" / "README.md").read_text()
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert sum(table in page for table in recorded.split("\n\n") if table.startswith(PREFIXES)) == 8


def test_quality_page_shows_the_recorded_divergences():
    found = tables.report(ROOT / "eval" / "results").split("\n\n")
    page = (ROOT / "docs" / "quality.md").read_text()
    assert [table in page for table in found if "SmolLM2" in table] == [True, True]
    assert [table in page for table in found if "| w4a8 | fp16 | tiny" in table] == [True]


def test_readme_shows_six_rows_of_a_recorded_table():
    found = tables.report(ROOT / "eval" / "results").split("\n\n")
    recorded = next(table for table in found if table.startswith("| in/out")).splitlines()
    readme = (ROOT / "README.md").read_text().split("\n\n")
    shown = next(part for part in readme if part.startswith("| in/out")).splitlines()
    assert shown[:2] == recorded[:2] and len(shown) == 2 + 6
    assert set(shown) <= set(recorded)


def test_change_is_against_unquantized_model_on_the_same_text():
    def run(dataset, weights, kv, ppl, model="m", protocol="gptq", seqlen=64, stride=None):
        facts = {"dataset": dataset, "model": model, "weights": weights, "kv": kv, "ppl": ppl}
        return {**facts, "protocol": protocol, "seqlen": seqlen, "arguments": {"stride": stride}}

    plain = [run("a", "fp16", "fp16", 10.0), run("b", "fp16", "fp16", 5.0)]
    plain += [run("a", "fp16", "fp16", 20.0, protocol="sliding"), run("a", "fp16", "fp16", 40.0, model="n")]
    sliding = [run("a", "fp16", "int8", 22.0, protocol="sliding", stride=stride) for stride in (63, 5)]
    others = [("w8a16", {"seqlen": 32}), ("w8a16", {"model": "m-other"})]
    runs = [run("a", "w4a16", "int8", 11.0, "dir/m-w4"), *plain, *sliding]
    runs += [run("a", "w8a8", "fp16", 44.0, "n-w8a8")]
    runs += [run("a", weights, "fp16", 9.0, **facts) for weights, facts in others]
    lines = tables.perplexities(runs).splitlines()[2:]
    same = ["+0.00 % |"] * 4
    assert [line.split("| ")[-1] for line in lines] == [
        "+10.00 % |", *same, "+10.00 % |", " |", "+10.00 % |", " |", " |"
    ]  # fmt: skip


def test_a_folder_without_results_is_named(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "none"):
        assert tables.main([str(folder)]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert_error(shown.err, str(folder), "--json")


def test_loads_show_the_steady_rate_and_the_kinds_of_steps():
    kind = {"prompts": False, "recorded": True, "count": 1061, "share": 0.4, "ms": 4.6, "wait_ms": 0.1,
            "host_ms": 0.5, "decodes": 88.2, "prompt_tokens": 0.0}  # fmt: skip
    steady = {"lengths": {"name": "9/6"}, "running": 2048, "output_tokens_per_second": 100.0,
              "window": {"output_tokens_per_second": 20100.0}, "host_gap": 0.01, "steps": [kind]}  # fmt: skip
    whole = {**steady, "lengths": {"name": "sharegpt"}, "window": None}
    on_cpu = {**whole, "steps": None, "host_gap": None}
    results = [{"model": "m", "weights": "w8a8", "kv": "int4", "loads": [steady, whole, on_cpu]}]
    assert tables.throughputs(results).splitlines()[2:] == [
        "| m w8a8 | int4 | 9/6 | 2,048 | 20,100 | 100 | 1.00 % |",
        "| m w8a8 | int4 | sharegpt | 2,048 | 100 |  | 1.00 % |",
        "| m w8a8 | int4 | sharegpt | 2,048 | 100 |  |  |",
    ]
    (table,) = tables.step_kinds(results)
    assert table.startswith("| steps of sharegpt, m w8a8, KV int4 | count |")
    assert table.splitlines()[2] == (
        "| decodes alone, recorded | 1,061 | 40.0 % | 4.60 | 0.10 | 0.50 | 88 | 0 |"
    )


def test_loads_stand_beside_what_tensorrt_llm_publishes():
    def load(lengths, rate):
        return {"lengths": {"name": lengths}, "window": {"output_tokens_per_second": rate}}

    where = {"device": "NVIDIA H200"}
    ours = {"model": "llama-3-8b", "weights": "w8a8", "kv": "int4", "environment": where}
    recorded = {**ours, "loads": [load("128/128", 2 * 27_911), load("1000/1000", 17_744), load("9/9", 5)]}
    lines = tables.beside_published([recorded, {**recorded, "model": "other", "kv": "int8"}]).splitlines()
    assert lines[0] == "| in/out, output tokens/s | TensorRT-LLM 1.0, fp8 | w8a8, KV int4 |"
    assert lines[2] == "| 128/128 | 27,911 | 55,822 (2.00) |"
    assert lines[3] == "| 128/2048 | 26,221 |  |"
    assert [line for line in lines if "(1.00)" in line] == ["| 1000/1000 | 17,744 | 17,744 (1.00) |"]
    assert tables.beside_published([{**ours, "loads": []}]) == ""
    assert tables.beside_published([{**recorded, "environment": {"device": "A100"}}]) == ""


def test_divergences_and_answers_name_their_baseline():
    about = {"baseline": {"model": "m", "weights": "fp16", "kv": "fp16"}, "dataset": "t"}
    run = {"model": "m-w4", "weights": "w4a16", "kv": "int4"}
    kld = {"ppl": 10.1, "base_ppl": 10.0, "kl_mean": 0.0123, "top1_agreement": 0.987}
    counts = {"answers": 20, "same": 9, "near_ties": 1, "changed": 10, "same_tokens": 0.5, "first": 3}
    made = [{"command": "kld", **about, "runs": [run | kld]}]
    made += [{"command": "answers", **about, "runs": [run | counts | {"median": 40.5}]}]
    made += [{"command": "kld", **about, "dataset": "u", "runs": [run | kld]}]
    assert [table.splitlines()[2:] for table in tables.divergences(made)] == [
        [f"| {text} | m-w4 | w4a16 | int4 | m fp16, KV fp16 | 10.100 | +1.00 % | 1.23e-02 | 98.70 % |"]
        for text in "tu"
    ]
    assert tables.answers(made).splitlines()[2:] == [
        "| m-w4 | w4a16 | int4 | m fp16, KV fp16 | 20 | 9 | 1 | 10 | 40.5 (from 3) | 50 % |"
    ]


def test_kernel_tables_sum_a_layers_products():
    def cell(op, what, at, us):
        return {"op": op, "what": what, "at": at, "us": us, "floor_us": us / 4}

    rows = [cell("linear", "w4a16 qkv", "M=1", 5), cell("linear", "w4a16 sum", "M=1", 20),
            cell("linear", "bf16 sum", "M=16", 80), cell("decode", "int4", "1 x 4096", 12),
            cell("linear", "w8a8 head", "M=64", 140)]  # fmt: skip
    first, second, head = tables.kernels([{"kernels": rows}])
    assert head.splitlines()[0] == "| head, us (floor) | M=64 |"
    assert head.splitlines()[-1] == "| w8a8 | 140.0 (25 %) |"
    assert first.splitlines() == [
        "| linear, us (floor) | M=1 | M=16 |", "| --- | --- | --- |",
        "| w4a16 | 20.0 (25 %) |  |", "| bf16 |  | 80.0 (25 %) |",
    ]  # fmt: skip
    assert second.splitlines()[-1] == "| int4 | 12.0 (25 %) |"


def test_a_sweep_is_a_table():
    cell = {"weights": "w4a16", "kv": "int8", "weight_bytes": 4_610_000, "kv_bytes_per_token": 1632,
            "max_concurrent_requests": 1234, "ppl": 10.0, "ppl_change": 0.0123, "kl_mean": 0.00123,
            "top1_agreement": 0.987, "tokens_per_second": 1500.4}  # fmt: skip
    sweep = {"model": "m", "dataset": "t", "context_tokens": 512, "memory_bytes": 1 << 30, "batch": 8}
    (shown,) = tables.sweeps([{**sweep, "cells": [cell]}, {"cells": [cell]}])
    assert shown.splitlines()[0].startswith(
        "| m, weights | KV | weights MB | KV bytes/token | requests of 512 tok"
    )
    assert shown.splitlines()[2] == (
        "| w4a16 | int8 | 4.61 | 1,632 | 1,234 | 10.000 | +1.23 % | 1.23e-03 | 98.70 % | 1,500 |"
    )


def test_each_device_has_its_own_tables(tmp_path):
    def where(device, cuda):
        return {"device": device, "cuda": cuda, "versions": {"torch": "2", "triton": "3"}}

    row = {"batch": 1, "input_len": 8, "prefill_tokens_per_s": 10, "decode_ms_per_step": 2, "floor_ms": 1}
    other = {"by": "transformers", "weights": "bf16", "kv": "bf16", **row}
    cpu = {
        "model": "m",
        "weights": "w4a16",
        "kv": "int8",
        "rows": [row, other],
        "environment": where("A", None),
    }
    gpu = {"kernels": [], "environment": where("B", "13")}
    for name, result in (("cpu", cpu), ("gpu", gpu)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert tables.report(tmp_path).splitlines() == [
        "Measured on B, torch 2, Triton 3.", "",
        "Measured on A, torch 2, Triton 3.", "",
        "| model | KV | batch x prompt | prefill tokens/s | decode ms/step | floor ms | GPU waits |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| m w4a16 | int8 | 1 x 8 | 10 | 2.00 | 1.00 |  |",
        "| m bf16, transformers | bf16 | 1 x 8 | 10 | 2.00 | 1.00 |  |",
    ]  # fmt: skip


def test_of_several_results_of_a_step_the_newest_is_shown():
    def result(date, *steps):
        same = {"input_len": 8, "prefill_tokens_per_s": 10, "floor_ms": 1}
        rows = [{"batch": batch, "decode_ms_per_step": ms, **same} for batch, ms in steps]
        return {"model": "m", "weights": "w4a16", "kv": "int8", "date": date, "rows": rows}

    results = [result("2026-02-01", (16, 3), (1, 2)), result("2026-01-01", (16, 5), (4, 4))]
    lines = tables.latencies(results).splitlines()[2:]
    assert [line.split(" | ")[2:5:2] for line in lines] == [
        ["1 x 8", "2.00"],
        ["4 x 8", "4.00"],
        ["16 x 8", "3.00"],
    ]
