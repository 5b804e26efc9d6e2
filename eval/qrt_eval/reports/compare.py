"""Compare two result files of one command and mark what changed beyond noise: `qrt-eval compare A B`.

A metric's noise is one standard error, taken from what the files hold: losses of the same windows (paired, so
that differences between windows cancel), repeats of a timing, or requests of a load. If a file holds a single
timing, 3 % are assumed, and the table says so. Perplexities of different tokenizers do not compare; bits per
byte replace them.
"""

from __future__ import annotations

import json
import math
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from qrt.errors import ConfigError
from qrt_eval.quality.protocol import Sliding, default_stride
from qrt_eval.reports.metrics import METRICS, Metric, Result, bits_per_byte
from qrt_eval.results.console import show

ASSUMED_NOISE = 0.03  # relative, for a timing that was not repeated
SAME_TEXT = ("dataset", "text_sha256", "protocol", "seqlen")


@dataclass(frozen=True)
class Change:
    """Hold one metric before and after. `noise` is the difference's standard error, in the metric's unit."""

    name: str
    before: float
    after: float
    noise: float
    assumed: bool
    verdict: str


def run(arguments: Namespace) -> None:
    """Run `qrt-eval compare`: print what differs between the runs, then every metric that both files have."""
    before, after = (load(path) for path in arguments.results)
    first, second = kind(before), kind(after)
    if first != second:
        raise ConfigError(
            f"compare: expected two results of one command, got {arguments.results[0]} of {first} and "
            f"{arguments.results[1]} of {second}"
        )
    old_text, new_text = text_of(before), text_of(after)
    for key, old in old_text.items():
        if old != new_text[key]:
            raise ConfigError(
                f"compare: expected the same {key} in both files, got {old} and {new_text[key]}; run one of "
                "them again"
            )
    for name, old, new in settings(before, after):
        print(f"{name}: {old} -> {new}")
    if tokens_differ(before, after):
        print("The tokenizers differ, so bits per byte are compared, not perplexities")
    changes = compare(before, after, arguments.sigmas)
    if not changes:
        raise ConfigError("compare: expected a metric of the same model, format and size in both, got none")
    print_table(changes, arguments.sigmas)


def load(path: str) -> dict[str, Any]:
    """Read a result file; ConfigError if it is not one."""
    try:
        result = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"compare: expected a result file, got {path}, which does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected JSON, got something else ({error})") from None
    if not isinstance(result, dict) or "environment" not in result:
        raise ConfigError(f"{path}: expected a result that qrt-eval wrote with --json, got other JSON")
    if kind(result) not in METRICS:
        known = ", ".join(METRICS)
        raise ConfigError(f"{path}: expected a result of {known}, got one of {kind(result)}")
    try:
        for metric in METRICS[kind(result)](result).values():
            float(metric.value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: expected all entries of a result of {kind(result)}, got a file without some "
            f"({type(error).__name__}: {error}); write it again with --json"
        ) from None
    return result


def text_of(result: Result) -> dict[str, Any]:
    """Return which text a run read and how it cut it. Losses compare only if all of this is equal."""
    found = {key: result.get(key) for key in SAME_TEXT}
    asked = (result.get("arguments") or {}).get("stride")
    if found["protocol"] == Sliding.name and asked is None:
        asked = default_stride(result["seqlen"])
    return {**found, "stride": asked}


def tokens_differ(before: Result, after: Result) -> bool:
    """Return whether two perplexities are known to count different tokens."""
    one, other = (result.get("tokenizer_sha256") for result in (before, after))
    return kind(before) == "ppl" and None not in (one, other) and one != other


def kind(result: Result) -> str:
    """Return the command that wrote a file. Older files do not name it, so their keys decide."""
    by_key = {"kernels": "kernels", "rows": "latency", "ppl": "ppl"}
    return str(result.get("command") or next((name for key, name in by_key.items() if key in result), "?"))


def settings(before: Result, after: Result) -> Iterator[tuple[str, Any, Any]]:
    """Yield every fact in which the two runs differ: flags, model, versions, device, commit."""
    for name in ("model", "model_sha256", "weights", "kv", "dtype", "model_id", "tokenizer_sha256"):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)
    for part in ("arguments", "environment"):
        old, new = _flat(before.get(part) or {}), _flat(after.get(part) or {})
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name) and name not in ("model", "kv", "weights", "dtype"):
                yield name, old.get(name), new.get(name)


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        flat |= {f"{name} {key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def compare(before: Result, after: Result, sigmas: float) -> list[Change]:
    """Return the changes of all metrics that both files have, in the order of the second file."""
    metrics = bits_per_byte if tokens_differ(before, after) else METRICS[kind(before)]
    old, new = metrics(before), metrics(after)
    paired = paired_noise(before, after)
    changes = []
    for name, metric in new.items():
        if name not in old:
            continue
        noises = [one.noise for one in (old[name], metric)]
        assumed = None in noises and name not in paired
        values = (old[name].value, metric.value)
        guesses = [ASSUMED_NOISE * abs(v) if n is None else n for v, n in zip(values, noises, strict=True)]
        noise = paired.get(name, math.hypot(*guesses))
        changes.append(Change(name, *values, noise, assumed, verdict(*values, noise * sigmas, metric)))
    return changes


def verdict(before: float, after: float, bound: float, metric: Metric) -> str:
    """Return `same`, `better` or `worse`."""
    if abs(after - before) <= bound:
        return "same"
    return "better" if (after > before) == metric.more_is_better else "worse"


def paired_noise(before: Result, after: Result) -> dict[str, float]:
    """Return the noise of perplexities over the same windows, from the spread of their differences."""
    old, new = before.get("windows_nll"), after.get("windows_nll")
    if not old or not new or len(old) != len(new) or len(old) < 2:
        return {}
    spread = statistics.stdev(b - a for a, b in zip(old, new, strict=True))
    return {"ppl": after["ppl"] * spread / math.sqrt(len(old))}


def print_table(changes: Sequence[Change], sigmas: float) -> None:
    """Print every change, and mark those beyond the noise."""
    table = Table(title=f"changes beyond {sigmas:g} standard errors are marked", title_justify="left")
    for name in ("", "before", "after", "change", "noise", "verdict"):
        table.add_column(name, justify="left" if name in ("", "verdict") else "right")
    for change in changes:
        percent = "" if not change.before else f"{100 * (change.after / change.before - 1):+.2f} %"
        noise = f"± {change.noise:.3g}" + (" (assumed)" if change.assumed else "")
        table.add_row(
            change.name, f"{change.before:.6g}", f"{change.after:.6g}", percent, noise, change.verdict
        )
    show(table)
    counts = {word: sum(c.verdict == word for c in changes) for word in ("better", "worse", "same")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
