"""Print tables of the files in eval/results: `python -m qrt_eval.reports.tables [FOLDER]`.

All of them stand in eval/results/README.md, some in docs/benchmarks.md, docs/quality.md and README. The test
tests/eval/reports/test_tables.py checks all these pages. A table is a heading and a format for each column.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from string import Formatter
from typing import Any

from qrt.cli import run_main
from qrt.errors import ConfigError
from qrt_eval.quality.answers import place
from qrt_eval.reports.compare import text_of
from qrt_eval.reports.published import TENSORRT_LLM, TENSORRT_LLM_8B

Result = dict[str, Any]
QUANTIZED = re.compile(r"-w\d+(a\d+)?$")  # at the end of a checkpoint's name
NAMES = {"model": "{name}", "weights": "{weights}", "KV": "{kv}", "against": "{against}"}
PERPLEXITY = {"perplexity": "{ppl:.3f}", "change": "{change:+.2%}"}
LOSS = {**PERPLEXITY, "KL, nats": "{kl_mean:.2e}", "same top-1": "{top1_agreement:.2%}"}
PERPLEXITIES = {
    "text": "{dataset}", "model": "{model}", "weights": "{weights}", "KV": "{kv}", **PERPLEXITY,
}  # fmt: skip
ANSWERS = {
    **NAMES, "answers": "{answers}", "same": "{same}", "near ties": "{near_ties}", "changed": "{changed}",
    "changed at token": "{place}", "tokens before": "{same_tokens:.0%}",
}  # fmt: skip
LATENCIES = {
    "model": "{name}", "KV": "{kv}", "batch x prompt": "{batch} x {input_len:,}",
    "prefill tokens/s": "{prefill_tokens_per_s:,.0f}", "decode ms/step": "{decode_ms_per_step:.2f}",
    "floor ms": "{floor_ms:.2f}",
    "GPU waits": "{host_gap:.2%}",  # the share of the time between decode steps
}  # fmt: skip
THROUGHPUTS = {
    "model": "{model} {weights}", "KV": "{kv}", "lengths": "{lengths[name]}", "running": "{running:,}",
    "output tokens/s": "{rate:,.0f}", "of the whole run": "{whole:,.0f}", "GPU waits": "{host_gap:.2%}",
}  # fmt: skip
STEPS = {
    "count": "{count:,}", "share": "{share:.1%}", "ms each": "{ms:.2f}", "GPU waits ms": "{wait_ms:.2f}",
    "host ms": "{host_ms:.2f}", "decodes": "{decodes:,.0f}", "prompt tokens": "{prompt_tokens:,.0f}",
}  # fmt: skip


def load(folder: Path) -> list[Result]:
    """Read every result file below `folder`, in the order of their names; ConfigError if there is none."""
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise ConfigError(
            f"{folder}: expected result files, got none; write some there with qrt-eval ... --json"
        )
    return [json.loads(path.read_text()) for path in paths]


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a Markdown table; empty without rows."""
    head, rows = list(head), list(rows)
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class _Cells(Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        """Leave a cell without a value empty, and set a space before a percent sign."""
        return "" if value is None else format(value, spec).replace("%", " %")


def table(columns: Mapping[str, str], rows: Iterable[Result]) -> str:
    """Format a table whose cells are the columns' formats of each row."""
    return markdown(columns, [[_Cells().format(form, **row) for form in columns.values()] for row in rows])


def pivot(title: str, cells: Mapping[str, Mapping[str, str]], columns: Iterable[str]) -> str:
    """Format a table of the cells by row and column."""
    columns = list(columns)
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in cells.items()]
    return markdown([title, *columns], rows)


def perplexities(results: list[Result]) -> str:
    """Return a row per text, model and KV format.

    The change is against the unquantized pair of the same model over the same windows, if there is one.
    """
    runs = [result for result in results if "ppl" in result]
    plain = {_family(run): run["ppl"] for run in runs if (run["weights"], run["kv"]) == ("fp16", "fp16")}
    bases = [plain.get(_family(run)) for run in runs]
    changes = [base and run["ppl"] / base - 1 for run, base in zip(runs, bases, strict=True)]
    return table(PERPLEXITIES, [{**run, "change": by} for run, by in zip(runs, changes, strict=True)])


def _family(run: Result) -> tuple[Any, ...]:
    """Return what perplexities that compare have in common: the windows, and the original model.

    The names that qrt-calibrate gives show which model was the original.
    """
    return QUANTIZED.sub("", Path(run["model"]).name), *text_of(run).values()


def divergences(results: list[Result]) -> list[str]:
    """Return a table per text, a row per model and KV format: change of perplexity, KL from the baseline."""
    texts: dict[str, list[Result]] = {}
    for run in _runs(results, "kld"):
        change = run["ppl"] / run["base_ppl"] - 1
        texts.setdefault(run["dataset"], []).append({**run, "change": change})
    return [table({"text": "{dataset}", **NAMES, **LOSS}, rows) for rows in texts.values()]


def answers(results: list[Result]) -> str:
    """Return a row per model and KV format: how many answers differ from the baseline's, and from where."""
    return table(ANSWERS, [{**run, "place": place(run)} for run in _runs(results, "answers")])


def _runs(results: list[Result], command: str) -> Iterator[Result]:
    """Yield the runs of a command's results, each with its names and its baseline's."""
    for result in (result for result in results if result.get("command") == command):
        base = result["baseline"]
        against = f"{Path(base['model']).name} {base['weights']}, KV {base['kv']}"
        for run in result["runs"]:
            name = Path(run["model"]).name
            yield {**run, "name": name, "against": against, "dataset": result.get("dataset")}


def latencies(results: list[Result]) -> str:
    """Return a row per model, KV format, batch and prompt length; of several results the newest.

    Rows that qrt is compared with carry their own name.
    """
    newest: dict[tuple[str, str], dict[tuple[int, int], Result]] = {}
    for result in results:
        same = {"host_gap": None, "date": "", **result}
        for row in result.get("rows", ()):
            row = {**same, **row}
            by = f", {row['by']}" if "by" in row else ""
            ranks = result.get("arguments", {}).get("tensor_parallel_size", 1)
            by += f", {ranks} GPUs" if ranks > 1 else ""
            row |= {"name": f"{result['model']} {row['weights']}{by}", "floor_ms": row["floor_ms"] or None}
            sizes, size = newest.setdefault((row["name"], row["kv"]), {}), (row["batch"], row["input_len"])
            sizes[size] = max(sizes.get(size, row), row, key=itemgetter("date"))
    return table(LATENCIES, [sizes[size] for sizes in newest.values() for size in sorted(sizes)])


def throughputs(results: list[Result]) -> str:
    """Return a row per model, KV format and lengths, with the rate of the steady part if there is one."""
    rows = []
    for result, load in _loads(results):
        whole, steady = load["output_tokens_per_second"], load["window"]
        rates = {"rate": steady["output_tokens_per_second"], "whole": whole} if steady else {"rate": whole}
        rows.append({"whole": None, **result, **load, **rates})
    return table(THROUGHPUTS, rows)


def _loads(results: list[Result]) -> Iterator[tuple[Result, Result]]:
    for result in results:
        yield from ((result, load) for load in result.get("loads", ()))


def beside_published(results: list[Result]) -> str:
    """Return a row per IN/OUT that TensorRT-LLM publishes for this device.

    It holds the published rate, then each recorded rate of llama-3-8b with its ratio to that. Empty if none
    is recorded.
    """
    published = TENSORRT_LLM_8B.get(results[0]["environment"]["device"], {})
    cells = {lengths: {TENSORRT_LLM: f"{rate:,}"} for lengths, rate in published.items()}
    columns = [TENSORRT_LLM]
    for result, load in _loads(results):
        lengths = load["lengths"]["name"]
        if result.get("model") == "llama-3-8b" and load["window"] and lengths in published:
            rate = load["window"]["output_tokens_per_second"]
            columns.append(f"{result['weights']}, KV {result['kv']}")
            cells[lengths][columns[-1]] = f"{rate:,.0f} ({rate / published[lengths]:.2f})"
    return pivot("in/out, output tokens/s", cells, dict.fromkeys(columns)) if len(columns) > 1 else ""


def step_kinds(results: list[Result]) -> list[str]:
    """Return a table per load without a window: the kinds of steps that its time goes into."""
    tables = []
    for result, load in _loads(results):
        if load["steps"] and not load["window"]:
            model = f"{result['model']} {result['weights']}, KV {result['kv']}"
            columns = {f"steps of {load['lengths']['name']}, {model}": "{prompts}, {recorded}", **STEPS}
            tables.append(table(columns, [{**kind, **_kind(kind)} for kind in load["steps"]]))
    return tables


def _kind(kind: Result) -> Result:
    return {
        "prompts": "with prompts" if kind["prompts"] else "decodes alone",
        "recorded": "recorded" if kind["recorded"] else "kernel by kernel",
    }


def sweeps(results: list[Result]) -> list[str]:
    """Return a table per sweep, with a row per pair of weights and KV."""
    tables = []
    for result in (result for result in results if "cells" in result and "memory_bytes" in result):
        memory = f"{result['context_tokens']:,} tokens in {result['memory_bytes'] / (1 << 30):g} GiB"
        columns = {
            f"{result['model']}, weights": "{weights}",
            "KV": "{kv}",
            "weights MB": "{megabytes:,.2f}",
            "KV bytes/token": "{kv_bytes_per_token:,}",
            f"requests of {memory}": "{max_concurrent_requests:,}",
            **({**LOSS, "change": "{ppl_change:+.2%}"} if result["dataset"] else {}),
            f"tokens/s, batch {result['batch']}": "{tokens_per_second:,.0f}",
        }
        rows = [{**cell, "megabytes": cell["weight_bytes"] / 1e6} for cell in result["cells"]]
        tables.append(table(columns, rows))
    return tables


def kernels(results: list[Result]) -> list[str]:
    """Return a table per operator: microseconds, and the floor's share of them.

    A layer's products are summed up; heads have their own table.
    """
    cells: dict[str, dict[str, dict[str, str]]] = {}
    for row in (row for result in results for row in result.get("kernels", ())):
        what, _, part = row["what"].rpartition(" ") if row["op"] == "linear" else (row["what"], "", "sum")
        if part in ("sum", "head"):
            own = cells.setdefault("head" if part == "head" else row["op"], {}).setdefault(what, {})
            own[row["at"]] = f"{row['us']:,.1f} ({100 * row['floor_us'] / row['us']:.0f} %)"
    return [
        pivot(f"{op}, us (floor)", rows, sorted({at for row in rows.values() for at in row}, key=_numbers))
        for op, rows in cells.items()
    ]


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
    where = "; ".join(sorted({describe(result["environment"]) for result in results}))
    tables = [f"Measured on {where}.", perplexities(results), *divergences(results), answers(results)]
    tables += [latencies(results), throughputs(results), beside_published(results)]
    return "\n\n".join(filter(None, tables + step_kinds(results) + sweeps(results) + kernels(results)))


def describe(environment: Result) -> str:
    """Return device and versions of one run."""
    versions = environment["versions"]
    return f"{environment['device']}, torch {versions['torch']}, Triton {versions['triton']}"


def main(argv: Sequence[str]) -> int:
    """Print the tables of a folder; return the exit code."""
    return run_main(lambda: print(report(Path(argv[0] if argv else "eval/results"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
