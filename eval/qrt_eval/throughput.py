"""Offline throughput through the engine: `qrt-eval throughput`, in the key names of `vllm bench throughput`.

For each batch size that many requests are kept in flight until all prompts are done; a warm-up is not
reported, the median of the repeats is. The prefix cache is off and EOS is ignored, so every request computes
what its lengths say.

    achieved_GBps   weights of every step and K/V of every decoded token, over the whole time
    host_gap        share of the time between steps in which the GPU waits for the host; null on a CPU
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from tqdm import tqdm

from qrt.config import SamplingParams
from qrt.engine.engine import Engine
from qrt.errors import ConfigError
from qrt.text.data.files import decoding_fault, find_files
from qrt.text.data.json_rows import Broken
from qrt.text.data.rows import Row, read_lines, read_rows
from qrt.text.tokenizer import Tokenizer
from qrt_eval.console import show
from qrt_eval.latency import build_engine, described, linear_bytes, step
from qrt_eval.results import engine_facts, save

logger = logging.getLogger(__name__)

WARMUP_TOKENS = 4  # decoded by each request of the warm-up
PROMPTS_PER_SLOT = 2  # of --num-prompts, unless given: the batch is refilled once


def run(arguments: Namespace) -> None:
    """Build the engine once, time each batch size, write the JSON, print a table."""
    if arguments.prompts and not arguments.model:
        raise ConfigError("--prompts: a text needs a tokenizer; give --model instead of --shape")
    prompts = read_prompts(arguments.prompts, Tokenizer(arguments.model)) if arguments.prompts else None
    if prompts:
        arguments.input_len = max(map(len, prompts))
    engine = build_engine(arguments)
    rows = [measure(engine, batch, prompts, arguments) for batch in arguments.batch]
    best = max(rows, key=lambda row: row["tokens_per_second"])
    facts = engine_facts(engine, arguments.model or arguments.shape)
    save(arguments, {**facts, "best_batch": best["batch"], "batches": rows})
    print_table(arguments, rows)


def read_prompts(path: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return token ids of the prompts in a file: its lines, or the string or "prompt" of each row.

    A row without a prompt is left out with a warning; ConfigError where no prompt is left.
    """
    if not Path(path).is_file():
        raise ConfigError(f'--prompts {path}: no such file; give a text file or a .jsonl with "prompt" keys')
    (file,) = find_files(Path(path)).files
    if file.has_rows:
        found = {row.place: _prompt(row) for row in read_rows(file)}
    else:
        found = {f"line {number}": line for number, line in read_lines(file)}
    prompts = [prompt for prompt in found.values() if prompt is not None]
    without = [place for place, prompt in found.items() if prompt is None]
    if not prompts:
        raise ConfigError(
            f'--prompts {path}: holds no prompt; expected text, or rows with a "prompt" that is text'
        )
    if without:
        logger.warning(
            '--prompts %s: %d of %d rows have no "prompt" that is text (%s) and are left out',
            path, len(without), len(found), without[0],
        )  # fmt: skip
    return [tokenizer.encode(prompt) for prompt in prompts]


def _prompt(row: Row) -> str | None:
    """Return the row's text, or the "prompt" of an object; None where that is not text."""
    prompt = row.value.get("prompt") if isinstance(row.value, dict) else row.value
    is_text = isinstance(prompt, str) and not isinstance(prompt, Broken) and not decoding_fault(prompt)
    return prompt if is_text else None


def measure(
    engine: Engine, batch: int, prompts: Sequence[list[int]] | None, arguments: Namespace
) -> dict[str, Any]:
    """The row of one batch size."""
    count = arguments.num_prompts or PROMPTS_PER_SLOT * batch
    if prompts is None:
        random = np.random.default_rng(arguments.seed)
        vocab = engine.model.config.vocab_size
        prompts = random.integers(0, vocab, (count, arguments.input_len)).tolist()
    wanted = [prompts[i % len(prompts)] for i in range(count)]
    feed(engine, wanted[:batch], batch, WARMUP_TOKENS)  # compiles kernels; not reported
    bar = tqdm(range(arguments.repeats), unit="run", desc=f"Batch {batch}", disable=not sys.stderr.isatty())
    runs = [feed(engine, wanted, batch, arguments.output_len) for _ in bar]
    seconds = statistics.median_low([run.seconds for run in runs])
    run = next(run for run in runs if run.seconds == seconds)
    inputs = sum(map(len, wanted))
    read = run.steps * linear_bytes(engine.model) + run.kv_tokens * engine.kv_bytes_per_token
    return {
        "batch": batch,
        "elapsed_time": seconds,
        "num_requests": count,
        "total_num_tokens": inputs + run.output_tokens,
        "requests_per_second": count / seconds,
        "tokens_per_second": (inputs + run.output_tokens) / seconds,
        "output_tokens_per_second": run.output_tokens / seconds,
        "achieved_GBps": read / seconds / 1e9,
        "host_gap": run.host_gap,
        "repeats": [(inputs + run.output_tokens) / run.seconds for run in runs],
    }


@dataclass(frozen=True)
class Feed:
    """One pass over the prompts. `kv_tokens`: positions that decoded tokens attended, together."""

    seconds: float
    steps: int
    output_tokens: int
    kv_tokens: int
    host_gap: float | None


def feed(engine: Engine, prompts: Sequence[list[int]], batch: int, output_len: int) -> Feed:
    """Keep `batch` requests in flight until every prompt has decoded `output_len` tokens greedily."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    waiting = iter(enumerate(prompts))
    lengths: dict[str, int] = {}

    def admit(most: int) -> None:
        for index, prompt in waiting:
            engine.add(f"feed-{index}", prompt, params)
            lengths[f"feed-{index}"] = len(prompt)
            if len(lengths) >= most:
                return

    timeline = engine.start_timeline() if engine.model.device.type == "cuda" else None
    steps = outputs = kv_tokens = 0
    started = time.perf_counter()
    admit(batch)
    while engine.has_work:
        deltas = step(engine)
        steps += bool(deltas)
        for delta in deltas:
            outputs += len(delta.token_ids)
            kv_tokens += lengths[delta.request_id] * len(delta.token_ids)
            lengths[delta.request_id] += len(delta.token_ids)
            if delta.finish_reason:
                del lengths[delta.request_id]
        if len(lengths) < batch:
            admit(batch)
    seconds = time.perf_counter() - started
    gap = timeline.summary()["host_gap"] if timeline else None
    return Feed(seconds, steps, outputs, kv_tokens, gap)


def print_table(arguments: Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """The rows on stdout."""
    lengths = f"{arguments.input_len} tokens in, {arguments.output_len} out"
    table = Table(title=f"{described(arguments)}, KV {arguments.kv}, {lengths}", title_justify="left")
    for column in ("batch", "requests/s", "tokens/s", "output tokens/s", "spread", "GB/s", "host gap"):
        table.add_column(column, justify="right")
    for row in rows:
        spread = (max(row["repeats"]) - min(row["repeats"])) / row["tokens_per_second"]
        gap = "" if row["host_gap"] is None else f"{100 * row['host_gap']:.1f} %"
        rates = (f"{row[key]:,.1f}" for key in ("tokens_per_second", "output_tokens_per_second"))
        table.add_row(
            str(row["batch"]), f"{row['requests_per_second']:.2f}", *rates, f"{100 * spread:.1f} %",
            f"{row['achieved_GBps']:,.1f}", gap,
        )  # fmt: skip
    show(table)
