"""Print tables of the files in eval/results: `python -m qrt_eval.reports.tables [FOLDER]`.

All of them stand in eval/results/README.md, some in docs/benchmarks.md and README. The test
tests/eval/reports/test_tables.py checks all three pages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qrt.cli import run_main
from qrt.errors import ConfigError
from qrt_eval.quality.answers import place
from qrt_eval.reports.compare import text_of
from qrt_eval.reports.published import TENSORRT_LLM, TENSORRT_LLM_8B

Result = dict[str, Any]
NAMES = ("model", "weights", "KV")
QUANTIZED = re.compile(r"-w\d+(a\d+)?$")  # at the end of a checkpoint's name


def load(folder: Path) -> list[Result]:
    """Read every result file below `folder`, in the order of their names; ConfigError if there is none."""
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise ConfigError(
            f"{folder}: expected result files, got none; write some there with qrt-eval ... --json"
        )
    return [json.loads(path.read_text()) for path in paths]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def perplexities(results: list[Result]) -> str:
    """Return a row per text, model and KV format.

    The change is against the unquantized pair of the same model over the same windows, if there is one.
    """
    runs = [result for result in results if "ppl" in result]
    plain = {_family(run): run["ppl"] for run in runs if (run["weights"], run["kv"]) == ("fp16", "fp16")}
    rows = []
    for run in runs:
        base = plain.get(_family(run))
        change = f"{100 * (run['ppl'] / base - 1):+.2f} %" if base else ""
        rows.append((run["dataset"], run["model"], run["weights"], run["kv"], f"{run['ppl']:.3f}", change))
    return table(("text", "model", "weights", "KV", "perplexity", "change"), rows)


def _family(run: Result) -> tuple[Any, ...]:
    """Return what perplexities that compare have in common: the windows, and the original model.

    The names that qrt-calibrate gives show which model was the original.
    """
    return QUANTIZED.sub("", Path(run["model"]).name), *text_of(run).values()


def divergences(results: list[Result]) -> list[str]:
    """Return a table per text, a row per model and KV format: change of perplexity, KL from the baseline."""
    texts: dict[str, list[Result]] = {}
    for result in (result for result in results if result.get("command") == "kld"):
        texts.setdefault(result["dataset"], []).append(result)
    return [_divergences(own) for own in texts.values()]


def _divergences(results: list[Result]) -> str:
    rows = []
    for result in results:
        for run in result["runs"]:
            figures = (
                f"{run['ppl']:.3f}",
                f"{100 * (run['ppl'] / run['base_ppl'] - 1):+.2f} %",
                f"{run['kl_mean']:.2e}",
                f"{100 * run['top1_agreement']:.2f} %",
            )
            rows.append((result["dataset"], *_names(run), _against(result), *figures))
    return table(("text", *NAMES, "against", "perplexity", "change", "KL, nats", "same top-1"), rows)


def answers(results: list[Result]) -> str:
    """Return a row per model and KV format: how many answers differ from the baseline's, and from where."""
    rows = []
    for result in (result for result in results if result.get("command") == "answers"):
        for run in result["runs"]:
            counts = [str(run[name]) for name in ("answers", "same", "near_ties", "changed")]
            before = f"{100 * run['same_tokens']:.0f} %"
            rows.append((*_names(run), _against(result), *counts, place(run), before))
    head = ("answers", "same", "near ties", "changed", "changed at token", "tokens before")
    return table((*NAMES, "against", *head), rows)


def _names(run: Result) -> tuple[str, ...]:
    return Path(run["model"]).name, run["weights"], run["kv"]


def _against(result: Result) -> str:
    """Return the name of a run's baseline."""
    base = result["baseline"]
    return f"{Path(base['model']).name} {base['weights']}, KV {base['kv']}"


def latencies(results: list[Result]) -> str:
    """Return a row per model, KV format, batch and prompt length; of several results the newest.

    Rows that qrt is compared with carry their own name. "GPU waits" is the share of the time between decode
    steps in which the GPU has nothing to do.
    """
    newest: dict[tuple[str, str], dict[tuple[int, int], tuple[str, tuple[str, ...]]]] = {}
    for result in results:
        for row in result.get("rows", ()):
            by = f", {row['by']}" if "by" in row else ""
            ranks = result.get("arguments", {}).get("tensor_parallel_size", 1)
            by += f", {ranks} GPUs" if ranks > 1 else ""
            what = (
                f"{result['model']} {row.get('weights', result['weights'])}{by}",
                row.get("kv", result["kv"]),
            )
            sizes = newest.setdefault(what, {})
            values = (
                f"{row['batch']} x {row['input_len']:,}",
                f"{row['prefill_tokens_per_s']:,.0f}",
                f"{row['decode_ms_per_step']:.2f}",
                f"{row['floor_ms']:.2f}" if row["floor_ms"] else "",
                f"{100 * row['host_gap']:.2f} %" if row.get("host_gap") is not None else "",
            )
            size = row["batch"], row["input_len"]
            sizes[size] = max(sizes.get(size, ("", ())), (result.get("date", ""), values))
    rows = [what + sizes[size][1] for what, sizes in newest.items() for size in sorted(sizes)]
    head = ("model", "KV", "batch x prompt", "prefill tokens/s", "decode ms/step", "floor ms", "GPU waits")
    return table(head, rows)


def throughputs(results: list[Result]) -> str:
    """Return a row per model, KV format and lengths, with the rate of the steady part if there is one."""
    rows = []
    for result in results:
        for load in result.get("loads", ()):
            rate = (load["window"] or load)["output_tokens_per_second"]
            rows.append(
                (
                    f"{result['model']} {result['weights']}",
                    result["kv"],
                    load["lengths"]["name"],
                    f"{load['running']:,}",
                    f"{rate:,.0f}",
                    f"{load['output_tokens_per_second']:,.0f}" if load["window"] else "",
                    f"{100 * load['host_gap']:.2f} %" if load["host_gap"] is not None else "",
                )
            )
    head = ("model", "KV", "lengths", "running", "output tokens/s", "of the whole run", "GPU waits")
    return table(head, rows)


def beside_published(results: list[Result]) -> str:
    """Return a row per IN/OUT that TensorRT-LLM publishes for this device.

    It holds the published rate, then each recorded rate of llama-3-8b with its ratio to that. Empty if none
    is recorded.
    """
    published = TENSORRT_LLM_8B.get(results[0]["environment"]["device"], {})
    rates: dict[str, dict[str, float]] = {}
    for result in (result for result in results if result.get("model") == "llama-3-8b"):
        for load in result.get("loads", ()):
            if load["window"] and load["lengths"]["name"] in published:
                rate = load["window"]["output_tokens_per_second"]
                column = f"{result['weights']}, KV {result['kv']}"
                rates.setdefault(column, {})[load["lengths"]["name"]] = rate
    if not rates:
        return ""
    rows = [
        (lengths, f"{rate:,}", *(_times(own.get(lengths), rate) for own in rates.values()))
        for lengths, rate in published.items()
    ]
    return table(("in/out, output tokens/s", TENSORRT_LLM, *rates), rows)


def _times(rate: float | None, published: int) -> str:
    return f"{rate:,.0f} ({rate / published:.2f})" if rate else ""


def step_kinds(results: list[Result]) -> list[str]:
    """Return a table per load without a window: the kinds of steps that its time goes into."""
    head = ("count", "share", "ms each", "GPU waits ms", "host ms", "decodes", "prompt tokens")
    tables = []
    for result in results:
        for load in result.get("loads", ()):
            if load["window"] or not load["steps"]:
                continue
            model = f"{result['model']} {result['weights']}, KV {result['kv']}"
            title = f"steps of {load['lengths']['name']}, {model}"
            tables.append(table((title, *head), (_step(kind) for kind in load["steps"])))
    return tables


def _step(kind: Result) -> list[str]:
    name = "with prompts" if kind["prompts"] else "decodes alone"
    times = [f"{kind[key]:.2f}" for key in ("ms", "wait_ms", "host_ms")]
    return [
        f"{name}, {'recorded' if kind['recorded'] else 'kernel by kernel'}",
        f"{kind['count']:,}",
        f"{100 * kind['share']:.1f} %",
        *times,
        f"{kind['decodes']:,.0f}",
        f"{kind['prompt_tokens']:,.0f}",
    ]


def sweeps(results: list[Result]) -> list[str]:
    """Return a table per sweep, with a row per pair of weights and KV."""
    tables = []
    for result in (result for result in results if "cells" in result and "memory_bytes" in result):
        memory = f"{result['context_tokens']:,} tokens in {result['memory_bytes'] / (1 << 30):g} GiB"
        speed = f"tokens/s, batch {result['batch']}"
        head = ["KV", "weights MB", "KV bytes/token", f"requests of {memory}", speed]
        quality = ["perplexity", "change", "KL, nats", "same top-1"] if result["dataset"] else []
        rows = [_cell(cell, bool(quality)) for cell in result["cells"]]
        tables.append(table((f"{result['model']}, weights", *head[:4], *quality, head[4]), rows))
    return tables


def _cell(cell: Result, quality: bool) -> list[str]:
    row = [
        cell["weights"],
        cell["kv"],
        f"{cell['weight_bytes'] / 1e6:,.2f}",
        f"{cell['kv_bytes_per_token']:,}",
    ]
    row.append(f"{cell['max_concurrent_requests']:,}")
    if quality:
        row += [f"{cell['ppl']:.3f}", f"{100 * cell['ppl_change']:+.2f} %", f"{cell['kl_mean']:.2e}"]
        row.append(f"{100 * cell['top1_agreement']:.2f} %")
    return [*row, f"{cell['tokens_per_second']:,.0f}"]


def kernels(results: list[Result]) -> list[str]:
    """Return a table per operator: microseconds, and the floor's share of them.

    A layer's products are summed up; heads have their own table.
    """
    cells: dict[str, dict[str, dict[str, str]]] = {}
    for row in (row for result in results for row in result.get("kernels", ())):
        what, _, part = row["what"].rpartition(" ") if row["op"] == "linear" else (row["what"], "", "sum")
        if part not in ("sum", "head"):
            continue
        op = "head" if part == "head" else row["op"]
        text = f"{row['us']:,.1f} ({100 * row['floor_us'] / row['us']:.0f} %)"
        cells.setdefault(op, {}).setdefault(what, {})[row["at"]] = text
    tables = []
    for op, lines in cells.items():
        sizes = sorted({at for line in lines.values() for at in line}, key=_numbers)
        body = ((what, *(line.get(at, "") for at in sizes)) for what, line in lines.items())
        tables.append(table((f"{op}, us (floor)", *sizes), body))
    return tables


def _numbers(text: str) -> list[int]:
    """Return the numbers in a text, to sort by."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


def report(folder: Path) -> str:
    """Return every table that has rows, device by device, GPUs first."""
    devices: dict[tuple[bool, str], list[Result]] = {}
    for result in load(folder):
        where = result["environment"]
        devices.setdefault((where["cuda"] is None, where["device"]), []).append(result)
    return "\n\n".join(section(devices[device]) for device in sorted(devices))


def section(results: list[Result]) -> str:
    """Return the tables of one device, with its name and the versions."""
    where = sorted({describe(result["environment"]) for result in results})
    tables = ["Measured on " + "; ".join(where) + "."]
    if any("ppl" in result for result in results):
        tables.append(perplexities(results))
    tables += divergences(results)
    if any(result.get("command") == "answers" for result in results):
        tables.append(answers(results))
    if any("rows" in result for result in results):
        tables.append(latencies(results))
    if any("loads" in result for result in results):
        tables += [throughputs(results), *filter(None, [beside_published(results)])]
    return "\n\n".join(tables + step_kinds(results) + sweeps(results) + kernels(results))


def describe(environment: Result) -> str:
    """Return device and versions of one run."""
    versions = environment["versions"]
    return f"{environment['device']}, torch {versions['torch']}, Triton {versions['triton']}"


def main(argv: Sequence[str]) -> int:
    """Print the tables of a folder; return the exit code."""
    return run_main(lambda: print(report(Path(argv[0] if argv else "eval/results"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
