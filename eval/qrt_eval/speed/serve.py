"""Load any OpenAI-compatible server: `qrt-eval serve`, with the result keys of `vllm bench serve`.

ttft   time to the first chunk with a choice      itl    gaps between chunks
tpot   (latency - ttft) / (output tokens - 1)     e2el   whole latency
"""

from __future__ import annotations

import json
import math
import sys
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from qrt.config import ENV
from qrt.errors import CheckpointError, ConfigError, QrtError
from qrt.model_files.location import tokenizer_folder
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs.lengths import Lengths, facts_of, refuse_beside_lengths, sources
from qrt_eval.results.console import show
from qrt_eval.results.record import save
from qrt_eval.speed.load import Load, Outcome, Prompt, chunk_times, concurrency, delays, send

NUM_PROMPTS = 1000  # the default of --num-prompts
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def run(arguments: Namespace) -> None:
    """Run `qrt-eval serve`: send the load, write the JSON, print a table."""
    check(arguments)
    slos = parse_goodput(arguments.goodput)
    base = arguments.base_url.rstrip("/")
    key = arguments.api_key or ENV.api_key
    model = arguments.model or served_model(base, key)
    url = base + arguments.endpoint
    lengths, prompts = make_prompts(arguments, model)
    most = min(len(prompts), arguments.max_concurrency or len(prompts))
    body = {
        "model": model, "temperature": arguments.temperature, "stream": True,
        "stream_options": {"include_usage": True}, "seed": arguments.seed,
    }  # fmt: skip
    if arguments.ignore_eos or arguments.lengths:
        body["ignore_eos"] = True
    print(f"{len(prompts)} requests to {url}, one to warm up", file=sys.stderr)
    first, _ = send(Load(url, prompts[:1], body, [0.0], 1, key))
    if first[0].error:
        raise QrtError(f"{url}: the first request failed: {first[0].error}")
    at = delays(len(prompts), arguments.request_rate, arguments.burstiness, arguments.seed)
    load = Load(url, prompts, body, at, most, key)
    outcomes, seconds = send(load, arguments.processes)
    result = summarize(outcomes, seconds, slos, arguments.metric_percentiles)
    about = {
        "backend": "openai-chat" if url.endswith("/chat/completions") else "openai",
        "model_id": model,
        "num_prompts": len(prompts),
        "request_rate": "inf" if arguments.request_rate == float("inf") else arguments.request_rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    if arguments.lengths:
        about["lengths"] = facts_of(lengths, [(prompt.num_tokens, prompt.output_len) for prompt in prompts])
    detail = details(outcomes) if arguments.save_detailed else {}
    save(arguments, {**about, **result, **detail})
    print_table(about, result, arguments.metric_percentiles)
    if not result["completed"]:
        raise QrtError(f"{url}: every request failed, the first with: {outcomes[0].error}")


def check(arguments: Namespace) -> None:
    """Raise ConfigError for a load that is impossible."""
    if arguments.lengths:
        refuse_beside_lengths(arguments, "prompts", "input_len")
    most = min(arguments.num_prompts or NUM_PROMPTS, arguments.max_concurrency or math.inf)
    if arguments.processes > most:
        raise ConfigError(
            f"--processes: expected 1 to {most}, the requests that run at once, got {arguments.processes}"
        )
    if not arguments.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url: expected http(s)://HOST:PORT, got {arguments.base_url!r}")
    if not arguments.endpoint.startswith("/"):
        raise ConfigError(f"--endpoint: expected a path such as /v1/completions, got {arguments.endpoint!r}")


def served_model(base: str, key: str | None) -> str:
    """Return the first model that the server names; QrtError if it does not answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{base}/v1/models", headers=headers), timeout=30
        ) as r:
            return str(json.load(r)["data"][0]["id"])
    except (urllib.error.URLError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise QrtError(
            f"{base}/v1/models: expected an answer that names a model, got none ({error}); start the server, "
            "or give --model"
        ) from error


def make_prompts(arguments: Namespace, model: str) -> tuple[Lengths, list[Prompt]]:
    """Return where the requests come from, and `--num-prompts` of them."""
    chat = arguments.endpoint.endswith("/chat/completions")
    try:
        folder = tokenizer_folder(arguments.tokenizer or model, download_dir=arguments.download_dir)
    except CheckpointError as error:
        raise ConfigError(f"--tokenizer: expected one, to make prompts of a known length: {error}") from error
    tokenizer = Tokenizer(folder)
    (lengths,) = sources(arguments, [arguments.lengths] if arguments.lengths else [], lambda: tokenizer)
    count = arguments.num_prompts or (lengths.count if arguments.lengths else None) or NUM_PROMPTS
    special = tokenizer.all_special_ids
    plain = [i for i in range(len(tokenizer)) if i not in special]
    found = []
    for request in lengths.requests(count, arguments.seed, plain):
        content = tokenizer.decode(request.ids) if chat else request.ids
        found.append(Prompt(content, len(request.ids), request.output_len))
    return lengths, found


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Turn words like `ttft:500` into seconds by metric; ConfigError for another form."""
    slos = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            slos[name] = float(value) / 1e3
        except ValueError:
            raise ConfigError(
                f"--goodput: expected METRIC:MILLISECONDS, e.g. ttft:500, got {word!r}"
            ) from None
        if name not in METRICS or name == "itl":
            raise ConfigError(f"--goodput: expected ttft, tpot or e2el, got {word!r}")
    return slos


def summarize(
    outcomes: Sequence[Outcome], seconds: float, slos: dict[str, float], percentiles: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of `vllm bench serve` under its names; names that end in _ms are milliseconds."""
    done = [outcome for outcome in outcomes if not outcome.error]
    outputs, inputs = sum(o.output_tokens for o in done), sum(o.prompt_tokens for o in done)
    values = {
        "ttft": [o.ttft for o in done],
        "tpot": [o.tpot for o in done if o.tpot is not None],
        "itl": [gap for o in done for gap in o.itls],
        "e2el": [o.latency for o in done],
    }
    good = sum(all(within(o, name, limit) for name, limit in slos.items()) for o in done)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "request_goodput": good / seconds if slos else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": busiest_second(done),
        "max_concurrent_requests": concurrency(done),
    }
    for name, some in values.items():
        ms = np.array(some or [0.0]) * 1e3
        result |= {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
        result[f"std_{name}_ms"] = float(ms.std())
        result |= {f"p{p:g}_{name}_ms": float(np.percentile(ms, p)) for p in percentiles}
    return result


def within(outcome: Outcome, name: str, limit: float) -> bool:
    """Return whether a request met one objective. A single token has no time per further token."""
    value = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}[name]
    return value is None or value <= limit


def busiest_second(outcomes: Sequence[Outcome]) -> float:
    """Return the most output tokens that arrived in one whole second of the run.

    The tokens of a request are spread evenly over its chunks.
    """
    if not outcomes:
        return 0.0
    begin = min(o.started for o in outcomes)
    buckets: dict[int, float] = {}
    for outcome in outcomes:
        times = list(chunk_times(outcome))
        for at in times:
            second = int(at - begin)
            buckets[second] = buckets.get(second, 0.0) + outcome.output_tokens / len(times)
    return max(buckets.values())


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what `--save-detailed` adds: a list per quantity, with an entry per request."""
    begin = min(o.started for o in outcomes)
    return {
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itls for o in outcomes],
        "start_times": [o.started - begin for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def print_table(about: dict[str, Any], result: dict[str, Any], percentiles: Sequence[float]) -> None:
    """Print the latencies in milliseconds, then the rates."""
    table = Table(title=f"{about['model_id']}, {about['num_prompts']} requests, rate {about['request_rate']}")
    table.add_column("")
    for name in ("mean", "median", "std", *(f"p{p:g}" for p in percentiles)):
        table.add_column(f"{name} ms", justify="right")
    for name, title in METRICS.items():
        keys = ("mean", "median", "std", *(f"p{p:g}" for p in percentiles))
        table.add_row(title, *(f"{result[f'{key}_{name}_ms']:,.2f}" for key in keys))
    show(table)
    goodput = result["request_goodput"]
    print(
        f"{result['completed']} completed, {result['failed']} failed in {result['duration']:.2f} s: "
        f"{result['request_throughput']:.2f} requests/s, {result['output_throughput']:,.1f} output tokens/s, "
        f"{result['total_token_throughput']:,.1f} tokens/s"
        + ("" if goodput is None else f", goodput {goodput:.2f} requests/s")
    )
