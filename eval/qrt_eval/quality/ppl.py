"""Measure perplexity by a named protocol: `qrt-eval ppl`. K and V pass through the KV format under test."""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from qrt.errors import QrtError
from qrt.offline.llm import LLM
from qrt_eval.inputs.preflight import shared_context
from qrt_eval.inputs.text import EvalText, load_text
from qrt_eval.quality.partial import UNKEPT, PartialResult, cut_of
from qrt_eval.quality.protocol import PROTOCOLS, Loss, Window, cut
from qrt_eval.results.console import show
from qrt_eval.results.record import model_facts, save, text_facts

WINDOWS_PER_BATCH = 8


@dataclass(frozen=True)
class Perplexity:
    """Hold the outcome of one model.

    figures       the protocol's figures: `ppl`, `stderr`, `bits_per_byte` and its own
    facts         what ran: model, scheme, KV format, dtype, hashes
    windows_nll   mean loss of each window, for paired comparisons
    seconds       time in the model, without tokenizing and loading
    resumed       windows that an interrupted run had scored
    """

    figures: Mapping[str, float]
    facts: Mapping[str, Any]
    tokens: int
    seqlen: int
    windows_nll: tuple[float, ...]
    seconds: float
    resumed: int = 0

    @property
    def ppl(self) -> float:
        """Return the perplexity of the scored tokens, as the protocol defines it."""
        return self.figures["ppl"]

    @property
    def windows(self) -> int:
        """Return how many windows were scored."""
        return len(self.windows_nll)


def run(arguments: Namespace) -> None:
    """Run `qrt-eval ppl`: score the model, then the baseline; write the JSON, print a table."""
    text = load_text(arguments.dataset, arguments.data_file)
    partial = PartialResult(arguments.json)
    result = _measure(arguments, arguments.model, arguments.kv, text, partial)
    baseline = None
    if arguments.baseline:
        baseline = _measure(arguments, arguments.baseline, arguments.baseline_kv, text, partial)
    facts = {**text_facts(text), "protocol": arguments.protocol, **as_json(result)}
    facts["baseline"] = None if baseline is None else as_json(baseline)
    save(arguments, facts)
    partial.remove()
    print_table(text, arguments.protocol, result, baseline)


def scorer(model: str, kv: str, dtype: str = "auto", max_model_len: int | None = None) -> LLM:
    """Load a model that reads K and V back from the cache; on a CPU in float32 unless asked otherwise."""
    if dtype == "auto" and not torch.cuda.is_available():
        dtype = "float32"
    settings = {"attend_cache": True, "enable_prefix_caching": False, "max_model_len": max_model_len}
    return LLM(model, kv=kv, dtype=dtype, **settings)


def _measure(arguments: Namespace, model: str, kv: str, text: EvalText, partial: PartialResult) -> Perplexity:
    llm = scorer(model, kv, arguments.dtype)
    windows, seqlen = cut(arguments.protocol, text, llm.tokenizer, shared_context(arguments), arguments)
    return perplexity(llm, arguments.protocol, windows, seqlen, text, arguments.batch, partial)


def perplexity(
    llm: LLM,
    protocol: str,
    windows: Sequence[Window],
    seqlen: int,
    text: EvalText,
    batch_size: int = WINDOWS_PER_BATCH,
    partial: PartialResult = UNKEPT,
) -> Perplexity:
    """Score `windows` of `text`, `batch_size` at once, and resume where an interrupted run stopped.

    The value depends neither on the batch nor on how the engine cuts prompts into chunks.
    """
    facts = model_facts(llm)
    run = {**facts, "protocol": protocol, "cut": cut_of(windows), "text": text.sha256}
    losses = {i: Loss(**kept) for i, kept in partial.load(run).items()}
    left, resumed = [i for i in range(len(windows)) if i not in losses], len(losses)
    started = time.perf_counter()
    if resumed:
        print(f"resuming an interrupted run: {resumed} of {len(windows)} windows are done", file=sys.stderr)
    with tqdm(total=len(windows), initial=resumed, unit="window", desc=f"Perplexity on {text.name}") as bar:
        for start in range(0, len(left), batch_size):
            batch = left[start : start + batch_size]
            new = dict(zip(batch, score(llm, [windows[i] for i in batch]), strict=True))
            partial.add(run, {i: asdict(loss) for i, loss in new.items()})
            losses |= new
            bar.update(len(batch))
            bar.set_postfix(ppl=f"{_so_far(protocol, windows, losses):.4f}")
    ordered = [losses[i] for i in range(len(windows))]
    figures = PROTOCOLS[protocol].figures(windows, ordered)
    means = tuple(loss.nll / loss.tokens for loss in ordered)
    tokens = sum(window.num_scored for window in windows)
    return Perplexity(figures, facts, tokens, seqlen, means, time.perf_counter() - started, resumed)


def score(llm: LLM, windows: Sequence[Window]) -> list[Loss]:
    """Return the losses of some windows, summed in float64; QrtError if one is not finite."""
    logprobs = llm.score([window.ids for window in windows])
    scored = [-row.double()[window.first - 1 :] for window, row in zip(windows, logprobs, strict=True)]
    for nll in scored:
        check_finite(llm, nll)
    return [Loss(float(nll.sum()), float(nll.square().sum()), len(nll)) for nll in scored]


def check_finite(llm: LLM, found: Tensor) -> None:
    """Raise QrtError if `found`, a model's losses or states, holds NaN or infinity.

    No figure computed from it would mean anything.
    """
    if not found.isfinite().all():
        raise QrtError(
            f"{llm.engine.config.model}: expected finite predictions, got NaN or infinity in "
            f"{llm.engine.model.dtype}; try --dtype float32, and if that fails too, the checkpoint is damaged"
        )


def _so_far(protocol: str, windows: Sequence[Window], losses: Mapping[int, Loss]) -> float:
    done = sorted(losses)
    return PROTOCOLS[protocol].perplexity([windows[i] for i in done], [losses[i] for i in done])


def as_json(result: Perplexity) -> dict[str, Any]:
    """Return one model's part of the result file. JSON has no infinity, so infinite figures are left out."""
    return {
        **result.facts,
        **{name: value for name, value in result.figures.items() if math.isfinite(value)},
        "tokens": result.tokens,
        "windows": result.windows,
        "seqlen": result.seqlen,
        "seconds": round(result.seconds, 3),
        "resumed_windows": result.resumed,
        "windows_nll": list(result.windows_nll),
    }


def print_table(text: EvalText, protocol: str, result: Perplexity, baseline: Perplexity | None) -> None:
    """Print the result, beside the baseline's and the difference."""
    title = f"{text.name}, protocol {protocol}, windows of {result.seqlen} tokens"
    table = Table(title=title, title_justify="left")
    for name in ("model", "weights", "KV"):
        table.add_column(name)
    own = [name for name in result.figures if name not in ("ppl", "stderr")]
    words = [name.replace("_", " ") for name in own]
    for name in ("perplexity", "change", *words, "tokens", "seconds"):
        table.add_column(name, justify="right")
    comparable = baseline is None or same_tokenizer(baseline.facts, result.facts)
    for row in (baseline, result):
        if row is None:
            continue
        percent = 100 * (row.ppl / baseline.ppl - 1) if baseline and comparable and row is result else None
        change = "" if percent is None else f"{percent:+.2f} %"
        facts = [str(row.facts[name]) for name in ("model", "weights", "kv")]
        figures = [f"{row.ppl:.4f} ± {row.figures['stderr']:.2f}", change]
        figures += [f"{row.figures[name]:.4f}" for name in own]
        table.add_row(*facts, *figures, f"{row.tokens:,}", f"{row.seconds:.1f}")
    show(table)
    if baseline and not comparable:
        percent = 100 * (result.figures["bits_per_byte"] / baseline.figures["bits_per_byte"] - 1)
        print(f"The tokenizers differ, so compare bits per byte, not perplexities: {percent:+.2f} %")


def same_tokenizer(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two models read a text as the same tokens."""
    return bool(one["tokenizer_sha256"] == other["tokenizer_sha256"])


def quick_perplexity(llm: LLM, text: EvalText, seqlen: int, limit: int) -> Perplexity:
    """Return the perplexity of the first `limit` windows by the `gptq` protocol."""
    windows = PROTOCOLS["gptq"].windows(text, llm.tokenizer, seqlen, None, limit)
    return perplexity(llm, "gptq", windows, seqlen, text)
