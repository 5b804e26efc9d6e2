"""Measure the KL divergence of a model's next-token distributions from a baseline's: `qrt-eval kld`.

It ranks schemes and formats that perplexity cannot tell apart. The baseline runs first and leaves its hidden
states; then every model and KV format runs over the same windows. Logits exist for some rows at a time. With
--json, an interrupted run continues with the windows it has not compared.
"""

from __future__ import annotations

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from qrt.errors import ConfigError
from qrt.offline.llm import LLM
from qrt_eval.inputs.preflight import shared_context
from qrt_eval.inputs.text import EvalText, load_text
from qrt_eval.quality import divergence, reference
from qrt_eval.quality.divergence import Positions
from qrt_eval.quality.forward import PromptReader, scored_states
from qrt_eval.quality.partial import UNKEPT, PartialResult, cut_of
from qrt_eval.quality.ppl import check_finite, same_tokenizer
from qrt_eval.quality.protocol import PROTOCOLS, GptqProtocol, Loss, Window, cut
from qrt_eval.quality.reference import ReferenceLogprobs
from qrt_eval.results.console import show
from qrt_eval.results.record import checkpoint_sha256, model_facts, save, text_facts

LOGITS_BYTES = 1 << 26  # most bytes of one model's logits in float64
TOP_P = 0.9  # the default of --top-p
CONTEXT_TOKENS = 16  # printed before a worst position
NOISE = 1e-9  # nats that rounding adds between equal distributions


@dataclass(frozen=True)
class Divergence:
    """Hold the comparison of one model with the baseline.

    figures   `ppl` and `base_ppl` by the protocol, and those of `qrt_eval.quality.divergence`
    worst     the positions with the largest KL, as they are printed; empty for the baseline itself
    seconds   time for all windows, with those that an interrupted run had compared
    """

    facts: dict[str, Any]
    figures: dict[str, float]
    worst: list[dict[str, Any]]
    tokens: int
    seconds: float


def run(arguments: Namespace) -> None:
    """Run `qrt-eval kld`: the baseline, then each model in each KV format; write the JSON, print tables."""
    if arguments.base_file:
        check_alone(arguments)
    else:
        arguments.protocol = arguments.protocol or GptqProtocol.name
    partial = PartialResult(arguments.json)
    base = base_reference(arguments, partial)
    if arguments.save_base:
        base.save(arguments.save_base)
        print(f"baseline written to {arguments.save_base}", file=sys.stderr)
    results = []
    for model, kv in _pairs(arguments):
        llm = reader_model(model, kv, arguments.dtype, base.longest)
        key = _key(arguments, base.facts, base.windows, model, kv)
        results.append(diverge(llm, base, arguments.top_p, arguments.worst, arguments.chunk, partial, key))
        del llm
        release()
    facts = {key: base.facts[key] for key in ("dataset", "source", "text_sha256", "protocol", "seqlen")}
    facts |= {"top_p": arguments.top_p, "baseline": base.facts["run"]}
    runs = [
        {**r.facts, **r.figures, "tokens": r.tokens, "seconds": r.seconds, "worst": r.worst} for r in results
    ]
    save(arguments, {**facts, "runs": runs})
    partial.remove()
    print_tables(base, results, arguments.top_p)


def check_alone(arguments: Namespace) -> None:
    """Raise ConfigError for a flag whose value --base-file decides."""
    for name in ("dataset", "data_file", "protocol", "seqlen", "stride", "limit", "baseline_kv"):
        if getattr(arguments, name) not in (None, "auto"):
            flag = name if name == "dataset" else f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag}: expected {flag} or --base-file, which has its own text, windows and baseline, got "
                f"both ({getattr(arguments, name)}); leave one out"
            )


def _pairs(arguments: Namespace) -> list[tuple[str, str]]:
    return [(model, kv) for model in arguments.model for kv in arguments.kv]


def _key(
    arguments: Namespace, base: Mapping[str, Any], windows: Sequence[Window], model: str, kv: str
) -> dict[str, Any]:
    """Return everything that the comparison of one pair with the baseline depends on."""
    settings = {name: getattr(arguments, name) for name in ("dtype", "chunk", "top_p")}
    about = {"model": checkpoint_sha256(model), "kv": kv, "cuda": torch.cuda.is_available()}
    return {**settings, **about, "base": dict(base), "cut": cut_of(windows)}


def reader_model(model: str, kv: str, dtype: str, longest: int | None) -> LLM:
    """Load a model that reads one window at a time, of up to `longest` tokens (None: the model's context).

    On a CPU it runs in float32 unless asked otherwise.
    """
    if dtype == "auto" and not torch.cuda.is_available():
        dtype = "float32"
    settings = {"enable_prefix_caching": False, "enforce_eager": True, "max_num_seqs": 1}
    return LLM(model, kv=kv, dtype=dtype, max_model_len=longest, **settings)


def base_reference(arguments: Namespace, partial: PartialResult) -> ReferenceLogprobs:
    """Return the baseline's distributions, read from --base-file or computed with --baseline-kv.

    The baseline is --baseline or the first --model. If they are not to be saved, only the windows that
    `partial` lacks are computed.
    """
    if arguments.base_file:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return reference.load(arguments.base_file, device)
    if not arguments.dataset:
        raise ConfigError(
            "kld: expected a text (wikitext, pydoc, a file or folder) or --base-file, got neither"
        )
    text = load_text(arguments.dataset, arguments.data_file)
    model = arguments.baseline or arguments.model[0]
    llm, windows, facts = ready_baseline(arguments, model, arguments.baseline_kv, text)
    needed = None
    if not arguments.save_base:
        kept = [partial.load(_key(arguments, facts, windows, *pair)) for pair in _pairs(arguments)]
        needed = {i for i in range(len(windows)) if any(i not in done for done in kept)}
    base = compute_reference(llm, windows, facts, arguments.chunk, needed)
    del llm
    release()
    return base


def ready_baseline(
    arguments: Namespace, model: str, kv: str, text: EvalText
) -> tuple[LLM, list[Window], dict[str, Any]]:
    """Return a baseline that has not run yet: the model, the windows of `text`, and the facts of both."""
    llm = reader_model(model, kv, arguments.dtype, arguments.seqlen)
    windows, seqlen = cut(arguments.protocol, text, llm.tokenizer, shared_context(arguments), arguments)
    facts = {**text_facts(text), "protocol": arguments.protocol, "seqlen": seqlen, "run": model_facts(llm)}
    return llm, windows, facts


def compute_reference(
    llm: LLM,
    windows: Sequence[Window],
    facts: dict[str, Any],
    chunk: int,
    needed: Container[int] | None = None,
) -> ReferenceLogprobs:
    """Run a baseline over `windows`, or over those that are `needed`; keep its head and hidden states.

    QrtError if they are not finite.
    """
    head, reader = reference.head_of(llm), PromptReader(llm, chunk)
    bar = tqdm(enumerate(windows), total=len(windows), unit="window", desc="Baseline")
    hidden = [
        scored_states(reader, w.ids, w.first) if needed is None or i in needed else None for i, w in bar
    ]
    for states in hidden:
        if states is not None:
            check_finite(llm, states)
    return ReferenceLogprobs(facts, windows, hidden, head)


def diverge(
    llm: LLM,
    base: ReferenceLogprobs,
    top_p: float,
    worst: int,
    chunk: int,
    partial: PartialResult = UNKEPT,
    key: Mapping[str, Any] | None = None,
) -> Divergence:
    """Compare a model with the baseline at every scored position.

    `key` names the run in `partial`, so that it continues where it was interrupted. ConfigError if the model
    reads other tokens, QrtError if its predictions are not finite.
    """
    facts = model_facts(llm)
    if not same_tokenizer(facts, base.facts["run"]):
        raise ConfigError(
            f"{facts['model']}: expected the tokenizer of {base.facts['run']['model']}, got a different one; "
            "compare bits per byte instead, with qrt-eval ppl --baseline"
        )
    vocab, other = llm.engine.model.arch.vocab_size, len(base.head)
    if vocab != other:
        raise ConfigError(
            f"{facts['model']}: expected the baseline's vocabulary of {other} tokens, got {vocab}"
        )
    reader, key = PromptReader(llm, chunk), key or {}
    kept = partial.load(key)
    if kept:
        done = f"{len(kept)} of {len(base.windows)} windows are done"
        print(f"resuming an interrupted run, KV {facts['kv']}: {done}", file=sys.stderr)
    bar = tqdm(zip(base.windows, base.hidden, strict=True), total=len(base.windows), unit="window", desc="KL")
    parts: list[Positions] = []
    total = seconds = 0.0
    for i, (window, states) in enumerate(bar):
        if (value := kept.get(i)) is not None:
            parts.append(Positions.from_json(value))
        else:
            assert states is not None
            started = time.perf_counter()
            parts.append(window_positions(reader, base, window, states, top_p))
            check_finite(llm, parts[-1].nll)
            value = {"seconds": time.perf_counter() - started, **parts[-1].to_json()}
            partial.add(key, {i: value})
        seconds += value["seconds"]
        total += float(parts[-1].kl.sum())
        bar.set_postfix(kl=f"{total / sum(map(len, parts)):.3g}")
    positions = Positions.concat(parts)
    figures = _perplexities(base, parts) | divergence.figures(positions)
    rows = worst_positions(llm, base, positions, worst)
    return Divergence(facts, figures, rows, len(positions), round(seconds, 3))


def window_positions(
    reader: PromptReader, base: ReferenceLogprobs, window: Window, states: Tensor, top_p: float
) -> Positions:
    """Compare all scored positions of one window, with the logits of some rows at a time."""
    model, rows = reader.model, max(1, LOGITS_BYTES // 8 // len(base.head))
    own = scored_states(reader, window.ids, window.first)
    targets = torch.tensor(window.ids[window.first :], device=model.device)
    parts = []
    with torch.inference_mode():
        for mine, theirs, ids in zip(own.split(rows), states.split(rows), targets.split(rows), strict=True):
            logits = model.logits(mine.to(model.device))
            parts.append(divergence.compare(base.logits(theirs), logits, ids, top_p))
    return Positions.concat(parts)


def _perplexities(base: ReferenceLogprobs, parts: Sequence[Positions]) -> dict[str, float]:
    """Return both perplexities, averaged as the protocol does."""
    chosen = PROTOCOLS[base.facts["protocol"]]

    def ppl(column: str) -> float:
        nlls = [getattr(part, column) for part in parts]
        losses = [Loss(float(nll.sum()), float(nll.square().sum()), len(nll)) for nll in nlls]
        return chosen.perplexity(base.windows, losses)

    return {"ppl": ppl("nll"), "base_ppl": ppl("base_nll")}


def worst_positions(
    llm: LLM, base: ReferenceLogprobs, positions: Positions, count: int
) -> list[dict[str, Any]]:
    """Return the `count` positions with the largest KL above NOISE.

    Each says where it is, which text stands before it, and what each model expected.
    """
    places = list(_places(base.windows))
    found = []
    for index in positions.kl.topk(min(count, int((positions.kl > NOISE).sum()))).indices.tolist():
        window, position = places[index]
        ids = base.windows[window].ids
        words = [(ids[max(0, position - CONTEXT_TOKENS) : position], "context"), ((ids[position],), "token")]
        words += [((int(positions.base_top[index]),), "base_top"), ((int(positions.top[index]),), "top")]
        texts = {name: llm.tokenizer.decode(some, skip_special_tokens=False) for some, name in words}
        found.append({"window": window, "position": position, "kl": float(positions.kl[index]), **texts})
    return found


def _places(windows: Sequence[Window]) -> Iterator[tuple[int, int]]:
    for i, window in enumerate(windows):
        for position in range(window.first, len(window.ids)):
            yield i, position


def release() -> None:
    """Free a dropped model's memory before the next one is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_tables(base: ReferenceLogprobs, results: Sequence[Divergence], top_p: float) -> None:
    """Print a row per model and KV format, then the worst positions of each."""
    facts, run = base.facts, base.facts["run"]
    title = (
        f"{facts['dataset']}, protocol {facts['protocol']}, windows of {facts['seqlen']} tokens, against "
        f"{run['model']} (KV {run['kv']}), perplexity {results[0].figures['base_ppl']:.4f}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("model", "weights", "KV"):
        table.add_column(name)
    for name in ("perplexity", "KL", "KL 99 %", "KL max", "same top-1", f"top-{top_p:g} flips"):
        table.add_column(name, justify="right")
    for result in results:
        f = result.figures
        kl = [f"{f['kl_mean']:.2e} ± {f['kl_se']:.0e}", f"{f['kl_p99']:.2e}", f"{f['kl_max']:.2e}"]
        shares = [f"{100 * f[key]:.2f} %" for key in ("top1_agreement", "top_p_flips")]
        names = [str(result.facts[name]) for name in ("model", "weights", "kv")]
        table.add_row(*names, f"{f['ppl']:.4f}", *kl, *shares)
    show(table)
    for result in results:
        if result.worst:
            print_worst(result)


def print_worst(result: Divergence) -> None:
    """Print where a model is furthest from the baseline."""
    title = f"worst positions of {result.facts['model']}, KV {result.facts['kv']}"
    table = Table(title=title, title_justify="left")
    table.add_column("KL", justify="right")
    for name in ("after", "came", "baseline expected", "expected"):
        table.add_column(name)
    for row in result.worst:
        texts = (repr(row[name]) for name in ("context", "token", "base_top", "top"))
        table.add_row(f"{row['kl']:.3f}", *texts)
    show(table)
