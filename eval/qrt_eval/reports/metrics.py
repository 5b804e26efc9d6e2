"""Read the metrics that `qrt-eval compare` compares from a result file, with their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """Hold a figure, whether more of it is better, and its standard error (`noise`; None if unknown)."""

    value: float
    noise: float | None
    more_is_better: bool


def _ppl(result: Result) -> dict[str, Metric]:
    return {"ppl": Metric(result["ppl"], result.get("stderr"), False)}


def bits_per_byte(result: Result) -> dict[str, Metric]:
    """Return the metric that replaces `ppl`. Its noise is that of the mean loss, the logarithm of `ppl`."""
    if "bits_per_byte" not in result:
        return {}
    value, ppl, stderr = result["bits_per_byte"], result.get("ppl", 1.0), result.get("stderr")
    noise = None if stderr is None or ppl <= 1 else value * stderr / ppl / math.log(ppl)
    return {"bits per byte": Metric(value, noise, False)}


def _kld(result: Result) -> dict[str, Metric]:
    found = {}
    for run in result["runs"]:
        name = f"{run['model']} {run['weights']}, KV {run['kv']}"
        found[f"{name}: KL"] = Metric(run["kl_mean"], run["kl_se"], False)
        found[f"{name}: same top-1"] = Metric(run["top1_agreement"], run["top1_agreement_se"], True)
        found[f"{name}: ln ppl ratio"] = Metric(run["ln_ppl_ratio"], run["ln_ppl_ratio_se"], False)
    return found


def _answers(result: Result) -> dict[str, Metric]:
    found = {}
    for run in result["runs"]:
        name = f"{run['model']} {run['weights']}, KV {run['kv']}"
        share = run["changed"] / run["answers"]
        noise = math.sqrt(share * (1 - share) / run["answers"])
        found[f"{name}: changed answers"] = Metric(share, noise, False)
    return found


def _throughput(result: Result) -> dict[str, Metric]:
    found = {}
    for row in result.get("batches", ()):
        rate = row["tokens_per_second"]
        found[f"batch {row['batch']}: tokens/s"] = Metric(rate, _error(row["repeats"]), True)
    for row in result.get("loads", ()):
        rate = (row["window"] or row)["output_tokens_per_second"]
        found[f"{row['lengths']['name']}: output tokens/s"] = Metric(rate, _error(row["repeats"]), True)
    return found


def _error(repeats: Sequence[float]) -> float | None:
    return statistics.stdev(repeats) / math.sqrt(len(repeats)) if len(repeats) > 1 else None


def _latency(result: Result) -> dict[str, Metric]:
    found = {}
    for row in result["rows"]:
        name = f"{row.get('by', 'qrt')} {row['batch']} x {row['input_len']}"
        found[f"{name}: decode ms/step"] = Metric(row["decode_ms_per_step"], None, False)
        found[f"{name}: prefill tokens/s"] = Metric(row["prefill_tokens_per_s"], None, True)
    return found


def _serve(result: Result) -> dict[str, Metric]:
    found = {}
    for name in ("ttft", "tpot", "itl", "e2el"):
        noise = result[f"std_{name}_ms"] / math.sqrt(max(result["completed"], 1))
        found[f"mean_{name}_ms"] = Metric(result[f"mean_{name}_ms"], noise, False)
    for name in ("request_throughput", "output_throughput"):
        found[name] = Metric(result[name], None, True)
    return found


def _kernels(result: Result) -> dict[str, Metric]:
    rows = result["kernels"]
    return {f"{row['op']} {row['what']}, {row['at']}: us": Metric(row["us"], None, False) for row in rows}


def _sweep(result: Result) -> dict[str, Metric]:
    found = {}
    for cell in result["cells"]:
        name = f"{cell['weights']} + {cell['kv']} KV"
        noises = {"ppl": None, "kl_mean": cell["kl_se"], "tokens_per_second": _error(cell["repeats"])}
        for key, noise in noises.items():
            if cell[key] is not None:
                found[f"{name}: {key}"] = Metric(cell[key], noise, key == "tokens_per_second")
    return found


def _grammar(result: Result) -> dict[str, Metric]:
    names = ("compile_ms", "mask_us", "accept_us")
    found = {name: Metric(result[name]["mean"], None, False) for name in names if "mean" in result[name]}
    return found | {"refused schemas": Metric(sum(result["refused"].values()), None, False)}


def _lm(result: Result) -> dict[str, Metric]:
    return {
        f"{row['task']} {row['metric']}": Metric(row["value"], row["stderr"], row["higher_is_better"])
        for row in result["scores"]
    }


def _passkey(result: Result) -> dict[str, Metric]:
    found = {}
    for cell in result["cells"]:
        name = f"KV {cell['kv']}, {cell['context_tokens']} tokens, depth {cell['depth']:g}"
        for key in ("retrieved", "chosen"):
            share = cell[key]
            noise = math.sqrt(share * (1 - share) / cell["trials"])
            found[f"{name}: {key}"] = Metric(share, noise, True)
    return found


def _kv_error(result: Result) -> dict[str, Metric]:
    return {
        f"KV {cell['kv']}, {cell['heads']}, {cell['context_tokens']} tokens: relative error": Metric(
            cell["relative_error"], None, False
        )
        for cell in result["cells"]
    }


METRICS: dict[str, Callable[[Result], dict[str, Metric]]] = {
    "ppl": _ppl,
    "kld": _kld,
    "answers": _answers,
    "lm": _lm,
    "throughput": _throughput,
    "latency": _latency,
    "serve": _serve,
    "kernels": _kernels,
    "sweep": _sweep,
    "passkey": _passkey,
    "kv-error": _kv_error,
    "grammar": _grammar,
}
