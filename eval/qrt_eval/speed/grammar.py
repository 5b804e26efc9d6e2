"""Time grammars without a model: `qrt-eval grammar FOLDER`, over JSON schemas and instances of them.

Files are those of MaskBench (github.com/guidance-ai/jsonschemabench, folder maskbench/data): an object with
`schema` and `tests`, of which each has `data` and whether it is `valid`; or a schema alone. Every instance is
replayed token by token, every second one indented: a mask is made, and the token accepted. Times are CPU time
of one thread.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from tqdm import tqdm

from qrt.errors import ConfigError
from qrt.grammar.compiled import deep_threads
from qrt.grammar.matcher import Matcher, Root
from qrt.grammar.parser import parser_of
from qrt.grammar.spec import Grammar, check_bounds
from qrt.grammar.vocabulary import Vocabulary
from qrt.model_files.location import model_name, tokenizer_folder
from qrt.request.structured_outputs import StructuredOutputsParams
from qrt.text.tokenizer import Tokenizer
from qrt_eval.results.console import show
from qrt_eval.results.record import save

TIMES = {"compile": 1e3, "mask": 1e6, "accept": 1e6}  # and how many of its unit a second has
COUNTS = ("valid", "valid_accepted", "invalid", "invalid_refused", "failed")
UNITS = {"compile": "ms", "mask": "us", "accept": "us"}


@dataclass
class Found:
    """What was counted, and the seconds that each piece of work took."""

    refused: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TIMES})


def run(arguments: Namespace) -> None:
    """Run `qrt-eval grammar`: replay all instances, write the JSON, print a table."""
    files = chosen(Path(arguments.schemas), arguments.limit, arguments.seed)
    tokenizer = Tokenizer(tokenizer_folder(arguments.tokenizer, download_dir=arguments.download_dir))
    width = arguments.vocab_size or len(tokenizer)
    vocabulary = Vocabulary.of(tokenizer, width, tokenizer.eos_token_ids)
    start = time.perf_counter()
    vocabulary.library  # noqa: B018 -- made here, and timed
    made = time.perf_counter() - start
    found = Found()
    with deep_threads(1, "grammar") as thread:
        for file in tqdm(files, unit="schema"):
            thread.submit(measure, json.loads(file.read_text()), vocabulary, tokenizer, found).result()
    result = {
        "tokenizer": model_name(arguments.tokenizer),
        "vocab_size": width,
        "vocabulary_s": made,
        "schemas": len(files),
        "refused": dict(found.refused.most_common()),
        **{name: found.counts[name] for name in COUNTS},
        **{f"{name}_{UNITS[name]}": summary(found.seconds[name], TIMES[name]) for name in TIMES},
    }
    save(arguments, result)
    print_table(result)


def chosen(folder: Path, limit: int | None, seed: int) -> list[Path]:
    """Return the folder's JSON files, or `limit` of them drawn by `seed`; ConfigError without any."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"schemas: expected a folder of .json files, got {folder}")
    if limit and limit < len(files):
        picked = np.random.default_rng(seed).choice(len(files), limit, replace=False)
        files = [files[index] for index in sorted(picked)]
    return files


def measure(file: Any, vocabulary: Vocabulary, tokenizer: Tokenizer, found: Found) -> None:
    """Compile one file's schema and replay its instances; add to `found`."""
    whole = isinstance(file, dict) and "tests" in file
    schema, tests = (file["schema"], file["tests"]) if whole else (file, [])
    start = time.thread_time()
    try:
        grammar = Grammar.of(StructuredOutputsParams(json=json.dumps(schema, ensure_ascii=False)))
        check_bounds(grammar)
        root = Root(parser_of(grammar, vocabulary), vocabulary)
    except ConfigError as error:
        found.refused[str(error).partition(", got ")[2][:80]] += 1
        return
    found.seconds["compile"].append(time.thread_time() - start)
    for number, test in enumerate(tests):
        text = json.dumps(test["data"], indent=None if number % 2 else 2, ensure_ascii=False)
        kind = "valid" if test["valid"] else "invalid"
        accepted = replay(root.matcher(), tokenizer.encode(text, add_special_tokens=False), vocabulary, found)
        found.counts[kind] += 1
        found.counts["valid_accepted"] += accepted and test["valid"]
        found.counts["invalid_refused"] += not accepted and not test["valid"]


def replay(matcher: Matcher, ids: Sequence[int], vocabulary: Vocabulary, found: Found) -> bool:
    """Return whether the tokens are an answer that the matcher allows."""
    row = np.empty(vocabulary.words, np.int32)
    for token_id in ids:
        start = time.thread_time()
        matcher.fill(row)
        filled = time.thread_time()
        found.seconds["mask"].append(filled - start)
        if not row[token_id // 32] >> token_id % 32 & 1:
            found.counts["failed"] += matcher.error is not None
            return False
        matcher.accept(token_id)
        found.seconds["accept"].append(time.thread_time() - filled)
    return matcher.may_end


def summary(seconds: Sequence[float], unit: float) -> dict[str, float]:
    """Return how many there are, their mean, percentiles and the longest."""
    if not seconds:
        return {"count": 0}
    times = unit * np.array(seconds)
    middle, high, highest = np.percentile(times, [50, 99, 100])
    return {
        "count": len(times), "mean": float(times.mean()), "p50": float(middle), "p99": float(high),
        "max": float(highest),
    }  # fmt: skip


def print_table(result: dict[str, Any]) -> None:
    """Print the times, and how many were refused and accepted."""
    table = Table(title=f"Grammars over {result['tokenizer']}, {result['vocab_size']:,} tokens, CPU time")
    for column in ("", "count", "mean", "p50", "p99", "max"):
        table.add_column(column, justify="left" if not column else "right")
    for name, unit in UNITS.items():
        times = result[f"{name}_{unit}"]
        shown = [f"{times[key]:,.1f}" if key in times else "-" for key in ("mean", "p50", "p99", "max")]
        table.add_row(f"{name}, {unit}", f"{times['count']:,}", *shown)
    show(table)
    refused = sum(result["refused"].values())
    print(
        f"{refused} of {result['schemas']} schemas refused; {result['valid_accepted']} of {result['valid']} "
        f"valid instances accepted, {result['invalid_refused']} of {result['invalid']} invalid ones refused; "
        f"{result['failed']} ended in an error"
    )
    for reason, count in list(result["refused"].items())[:8]:
        print(f"  {count} x {reason}")
