"""Perplexity by a named protocol, through the runtime: K and V pass through the KV format under test."""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from qrt.errors import ConfigError
from qrt.llm import LLM
from qrt_eval.results import write_json
from qrt_eval.text import EvalText, load_text

WINDOWS_PER_BATCH = 8
DEFAULT_SEQLEN = 2048


@dataclass(frozen=True)
class Perplexity:
    """The outcome of one run.

    tokens    scored tokens
    seconds   time in the model, tokenizing and loading left out
    """

    ppl: float
    tokens: int
    windows: int
    seqlen: int
    seconds: float


def gptq_windows(ids: list[int], seqlen: int, limit: int | None) -> list[list[int]]:
    """Non-overlapping windows of `seqlen` tokens, the tail dropped, the first `limit` of them."""
    if len(ids) < seqlen:
        raise ConfigError(
            f"the text has {len(ids)} tokens, less than one window of {seqlen}; use a longer text or --seqlen"
        )
    return [ids[i * seqlen : (i + 1) * seqlen] for i in range(len(ids) // seqlen)][:limit]


def gptq_perplexity(llm: LLM, text: EvalText, seqlen: int, limit: int | None = None) -> Perplexity:
    """The protocol of GPTQ, AWQ and most papers.

    The text is tokenized once (BOS as the tokenizer puts it: at the very start only), cut into windows of
    `seqlen`; positions 1.. of each window are scored; the result is exp(mean of the windows' mean NLL).
    """
    windows = gptq_windows(llm.get_tokenizer().encode(text.text), seqlen, limit)
    total, started = 0.0, time.perf_counter()
    with tqdm(total=len(windows), unit="window", desc=f"Perplexity on {text.name}") as bar:
        for start in range(0, len(windows), WINDOWS_PER_BATCH):
            batch = windows[start : start + WINDOWS_PER_BATCH]
            total += sum(-float(scores.double().mean()) for scores in llm.score(batch))
            bar.update(len(batch))
            bar.set_postfix(ppl=f"{math.exp(total / bar.n):.4f}")
    seconds = time.perf_counter() - started
    count = len(windows)
    return Perplexity(math.exp(total / count), count * (seqlen - 1), count, seqlen, seconds)


def run(arguments: Namespace) -> None:
    """`qrt-eval ppl`: score the model, then the baseline; print a table, write the JSON."""
    text = load_text(arguments.dataset, arguments.data_file)
    result, facts = _score(arguments, arguments.model, arguments.kv, text)
    baseline = None
    if arguments.baseline:
        baseline, _ = _score(arguments, arguments.baseline, "auto", text)
    print_table(text, arguments, result, baseline)
    if arguments.json:
        write_json(
            arguments.json,
            {
                "dataset": text.name,
                "source": text.source,
                "text_sha256": text.sha256,
                "protocol": arguments.protocol,
                "model": arguments.model,
                "kv": arguments.kv,
                **facts,
                "tokens": result.tokens,
                "windows": result.windows,
                "seqlen": result.seqlen,
                "ppl": result.ppl,
                "baseline": arguments.baseline,
                "baseline_ppl": baseline and baseline.ppl,
                "seconds": round(result.seconds, 3),
            },
        )
        print(f"result written to {arguments.json}", file=sys.stderr)


def scorer(model: str, kv: str, dtype: str = "auto") -> LLM:
    """A model that reads K and V back from the cache; on a CPU in float32 unless asked otherwise."""
    if dtype == "auto" and not torch.cuda.is_available():
        dtype = "float32"
    return LLM(model, kv=kv, dtype=dtype, attend_cache=True, enable_prefix_caching=False)


def _score(arguments: Namespace, model: str, kv: str, text: EvalText) -> tuple[Perplexity, dict[str, object]]:
    """Perplexity of `model` and what it ran as."""
    llm = scorer(model, kv, arguments.dtype)
    seqlen = arguments.seqlen or min(DEFAULT_SEQLEN, llm.max_model_len)
    if not 2 <= seqlen <= llm.max_model_len:
        raise ConfigError(f"--seqlen {seqlen}: wanted 2 to the model's context, {llm.max_model_len}")
    result = gptq_perplexity(llm, text, seqlen, arguments.limit)
    return result, {"weights": llm.weight_scheme, "dtype": llm.dtype}


def print_table(
    text: EvalText, arguments: Namespace, result: Perplexity, baseline: Perplexity | None
) -> None:
    """The result on stdout, the baseline's and the difference beside it."""
    table = Table(title=f"{text.name}, protocol {arguments.protocol}, windows of {result.seqlen} tokens")
    for name in ("model", "KV", "perplexity", "change", "tokens", "seconds"):
        table.add_column(name, justify="left" if name in ("model", "KV") else "right")
    if baseline:
        cells = (f"{baseline.ppl:.4f}", "", f"{baseline.tokens:,}", f"{baseline.seconds:.1f}")
        table.add_row(arguments.baseline, "fp16", *cells)
    change = f"{100 * (result.ppl / baseline.ppl - 1):+.2f} %" if baseline else ""
    cells = (f"{result.ppl:.4f}", change, f"{result.tokens:,}", f"{result.seconds:.1f}")
    table.add_row(arguments.model, arguments.kv, *cells)
    Console().print(table)
