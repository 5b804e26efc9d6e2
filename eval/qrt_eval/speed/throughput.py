"""Measure offline throughput of the engine: `qrt-eval throughput`, with keys of `vllm bench throughput`.

`--lengths` hands in all requests at once, with lengths as in real loads (see lengths.py), and gives one row
per word. The engine is built once, for the longest request. Without it, each batch size keeps that many
requests in flight until all prompts are done. A warm-up is not reported; the median of the repeats is. The
prefix cache is off and EOS is ignored, so every request computes what its lengths say.

Loads of IN/OUT are steady: the first requests begin in the middle of their outputs, and `window` is the part
of the run in which as many run as can (see workload.py). The other rates are of the whole run.

    achieved_GBps   weights of every step and K/V of every decoded token, over the whole time
    host_gap        share of the time from the first step to the last in which the GPU waits between two
    steps           the steps by kind (see qrt/engine/step/timeline.py); this and host_gap are null on a CPU
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from tqdm import tqdm

from qrt.engine.engine import Engine
from qrt.errors import ConfigError
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs.lengths import refuse_beside_lengths, sources
from qrt_eval.results.console import show
from qrt_eval.results.record import engine_facts, save
from qrt_eval.speed.feed import Feed, feed
from qrt_eval.speed.latency import build_engine, described, weight_bytes
from qrt_eval.speed.workload import Workload, all_at_once, in_batches, warmup

BATCHES = [1, 8, 32]  # the default of --batch
ENGINE_FLAGS = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager")


def run(arguments: Namespace) -> None:
    """Run `qrt-eval throughput`: build the engine once, time each load, print the tables.

    The JSON is written after each load, so an interrupted run keeps the loads before.
    """
    settle(arguments)
    found = sources(arguments, arguments.lengths or (), lambda: tokenizer(arguments))
    engine = engine_for(arguments, max(lengths.longest for lengths in found))
    if arguments.lengths:
        loads = (all_at_once(engine, lengths, arguments) for lengths in found)
    else:
        loads = (in_batches(engine, found[0], batch, arguments) for batch in arguments.batch)
    about = engine_facts(engine, arguments.model or arguments.shape) | limits_of(engine)
    rows: list[dict[str, Any]] = []
    for load in loads:
        rows.append(measure(engine, load, arguments.repeats))
        if arguments.lengths:
            save(arguments, {**about, "loads": rows})
        else:
            best = max(rows, key=lambda row: row["tokens_per_second"])
            save(arguments, {**about, "best_batch": best["batch"], "batches": rows})
    print_tables(arguments, rows)


def settle(arguments: Namespace) -> None:
    """Set the defaults that depend on --lengths; ConfigError for flags that exclude each other."""
    if arguments.lengths:
        refuse_beside_lengths(arguments, "batch")
        arguments.repeats = arguments.repeats or 1
        return
    for name in ("window", "window_seconds"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')}: expected --lengths beside it; give it, e.g. 128/128"
            )
    arguments.batch = arguments.batch or BATCHES
    arguments.repeats = arguments.repeats or 3


def tokenizer(arguments: Namespace) -> Tokenizer:
    """Return the model's tokenizer; ConfigError for a shape, which has none."""
    if not arguments.model:
        flag = "--prompts" if arguments.prompts else "--lengths"
        raise ConfigError(f"{flag}: expected --model, as text needs its tokenizer, got --shape")
    return Tokenizer(arguments.model)


def engine_for(arguments: Namespace, longest: int) -> Engine:
    """Build an engine for requests of up to `longest` tokens; ConfigError if --max-model-len is less."""
    most = arguments.max_model_len or longest
    if most < longest:
        raise ConfigError(
            f"--max-model-len: expected at least {longest}, the longest request, got {most}; leave the flag "
            "out, or give shorter lengths"
        )
    limits = {name: value for name in ENGINE_FLAGS if (value := getattr(arguments, name)) is not None}
    if arguments.batch:
        limits.setdefault("max_num_seqs", max(arguments.batch))
    return build_engine(arguments, max_model_len=most, **limits)


def limits_of(engine: Engine) -> dict[str, int]:
    """Return the engine's limits."""
    limits = engine.scheduler.limits
    return {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "kv_pool_tokens": engine.pool.num_slots,
    }


def measure(engine: Engine, load: Workload, repeats: int) -> dict[str, Any]:
    """Run a load and return the row of the repeat with the median rate."""
    feed(engine, warmup(engine, load), load.in_flight)  # compiles kernels; not reported
    bar = tqdm(range(repeats), unit="run", desc=load.name, disable=not sys.stderr.isatty())
    runs = [
        feed(engine, load.requests, load.in_flight, first=load.first, window_seconds=load.window_seconds)
        for _ in bar
    ]
    run = sorted(runs, key=lambda run: rate(load, run))[repeats // 2]
    return load.about | figures(engine, load, run) | {"repeats": [rate(load, run) for run in runs]}


def rate(load: Workload, run: Feed) -> float:
    """Return the rate that counts.

    With --lengths it is output tokens per second, in the window if there is one; with --batch, all tokens per
    second.
    """
    if load.in_flight:
        return (run.input_tokens + run.total.output_tokens) / run.total.seconds
    part = run.window or run.total
    return part.output_tokens / part.seconds


def figures(engine: Engine, load: Workload, run: Feed) -> dict[str, Any]:
    """Return the figures of one run."""
    total, window = run.total, run.window
    length = total.kv_tokens / max(1, total.output_tokens)
    tokens = (run.input_tokens + total.output_tokens) // max(1, total.steps)
    read = total.steps * weight_bytes(engine.model, tokens)
    read += total.output_tokens * engine.kv_bytes_read(length)
    found: dict[str, Any] = {
        "elapsed_time": total.seconds,
        "num_requests": len(load.requests),
        "total_num_tokens": run.input_tokens + total.output_tokens,
        "requests_per_second": total.finished / total.seconds,
        "tokens_per_second": (run.input_tokens + total.output_tokens) / total.seconds,
        "output_tokens_per_second": total.output_tokens / total.seconds,
        "achieved_GBps": read / total.seconds / 1e9,
        "host_gap": run.timeline and run.timeline["host_gap"],
        "steps": run.timeline and run.timeline["steps"],
        "running": run.running,
    }
    if not load.in_flight:
        found |= {"started": total.started, "finished": total.finished, "window": None}
    if window:
        per_second = window.output_tokens / window.seconds
        found["window"] = asdict(window) | {"first": load.first, "output_tokens_per_second": per_second}
    return found


def print_tables(arguments: Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the rows, then the steps of each row by kind."""
    what = "all requests at once"
    if arguments.batch:
        what = f"{arguments.input_len} tokens in, {arguments.output_len} out"
    _show(f"{described(arguments)}, KV {arguments.kv}, {what}", [_cells(row) for row in rows])
    for row in rows:
        if row["steps"]:
            name = f"batch {row['batch']}" if "batch" in row else row["lengths"]["name"]
            _show(f"steps of {name}", [_step_cells(kind) for kind in row["steps"]])


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row by column."""
    rates = {
        "output tokens/s": f"{row['output_tokens_per_second']:,.1f}",
        "tokens/s": f"{row['tokens_per_second']:,.1f}",
        "requests/s": f"{row['requests_per_second']:.2f}",
        "spread": f"{100 * (max(row['repeats']) / min(row['repeats']) - 1):.1f} %",
    }
    gap = {"GPU waits": "" if row["host_gap"] is None else f"{100 * row['host_gap']:.1f} %"}
    if "batch" in row:
        return {"batch": str(row["batch"]), **rates, "GB/s": f"{row['achieved_GBps']:,.1f}", **gap}
    steady = f"{row['window']['output_tokens_per_second']:,.1f}" if row["window"] else ""
    counts = {"requests": f"{row['num_requests']:,}", "running": f"{row['running']:,}"}
    return {"lengths": row["lengths"]["name"], **counts, "steady output tokens/s": steady, **rates, **gap}


def _step_cells(kind: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a kind of step by column."""
    return {
        "steps": f"{'with prompts' if kind['prompts'] else 'decodes'}, "
        + ("recorded" if kind["recorded"] else "launched"),
        "count": f"{kind['count']:,}",
        "share": f"{100 * kind['share']:.1f} %",
        "ms each": f"{kind['ms']:.2f}",
        "GPU waits ms": f"{kind['wait_ms']:.2f}",
        "host ms": f"{kind['host_ms']:.2f}",
        "decodes": f"{kind['decodes']:,.1f}",
        "prompt tokens": f"{kind['prompt_tokens']:,.1f}",
    }


def _show(title: str, rows: Sequence[dict[str, str]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row.values())
    show(table)
