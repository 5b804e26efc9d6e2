"""EngineMetrics: counts and times of the engine's requests, in Prometheus' text format and as one log line.

Names are vLLM's with the prefix `qrt:`, and so are the labels. All is counted in the engine process, so that
every API process answers `/metrics` with the same figures. Times of a request start when its
API process got it.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from qrt.engine.engine import Engine
from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.serve.link.messages import Add, EngineInfo
from qrt.serve.link.metric_names import MetricNames

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
BLOCK = 16  # tokens of a block in cache_config, whose names are vLLM's; qrt itself allocates by the token
RATE_SECONDS = 10.0  # time over which tokens per second are averaged

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a request.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean of a request, its first token left out.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", REQUEST_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", REQUEST_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", REQUEST_SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_generation_tokens": ("Output tokens of a request.", TOKENS),
    "request_params_max_tokens": ("max_tokens of a request, where given.", TOKENS),
    "iteration_tokens_total": ("Tokens of prompts begun in a step and tokens sampled in it.", TOKENS),
    "engine_step_seconds": ("Duration of a step.", TOKEN_SECONDS),
}


class Histogram:
    """Counts of observations by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the cumulative buckets of the Prometheus format."""
        total, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


@dataclass(slots=True)
class _Times:
    """Times of one request, in seconds of the monotonic clock."""

    arrived: float
    num_prompt: int
    started: float | None = None
    first: float | None = None
    last: float = 0.0
    num_output: int = 0


class EngineMetrics(Collector):
    """Collects what the Router reports. One thread at a time may call it.

    names   of all families, and their labels
    """

    def __init__(self, engine: Engine, info: EngineInfo, names: MetricNames) -> None:
        self.names = names
        self._engine = engine
        self._info = info
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._finished: Counter[str] = Counter()
        self._errors: Counter[int] = Counter()
        self._num_prompt = self._num_output = 0
        self._requests: dict[str, _Times] = {}
        self._not_started: set[str] = set()
        self._recent: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])

    def added(self, message: Add) -> None:
        """Note a request that has been queued."""
        self._requests[message.id] = _Times(message.arrived, len(message.prompt_ids))
        self._not_started.add(message.id)
        self._histograms["request_prompt_tokens"].add(len(message.prompt_ids))
        if (most := message.params.get("max_tokens")) is not None:
            self._histograms["request_params_max_tokens"].add(most)

    def ended(self, request_id: str, reason: FinishReason) -> None:
        """Note a request that was ended by a stop string in its text, or because its client left."""
        if (times := self._requests.get(request_id)) is not None:
            self._finish(request_id, times, reason)

    def failed(self, code: int) -> None:
        """Count an HTTP request that got an error."""
        self._errors[code] += 1

    def step(self, started: float, deltas: Sequence[StepDelta]) -> None:
        """Note the `deltas` of a step that began at `started`."""
        now, num_prompt = time.monotonic(), self._num_prompt
        if self._not_started:
            running = [request.id for request in self._engine.scheduler.running]
            self._note_started(running + [delta.request_id for delta in deltas], started)
        num_tokens, gaps = 0, Counter[float]()
        for delta in deltas:
            times = self._requests.get(delta.request_id)
            if times is None:
                continue
            if delta.token_ids:
                num_tokens += len(delta.token_ids)
                self._note_tokens(times, now, len(delta.token_ids), gaps)
            if delta.finish_reason:
                self._finish(delta.request_id, times, delta.finish_reason)
        for gap, count in gaps.items():
            self._histograms["inter_token_latency_seconds"].add(gap, count)
        self._num_output += num_tokens
        self._histograms["iteration_tokens_total"].add(self._num_prompt - num_prompt + num_tokens)
        self._histograms["engine_step_seconds"].add(now - started)
        self._note_rate(now)

    def _note_started(self, request_ids: Iterable[str], started: float) -> None:
        """Note the requests of a step; count the prompts of those that it started.

        Waiting requests are not looked at: there may be thousands.
        """
        for request_id in self._not_started.intersection(request_ids):
            times = self._requests[request_id]
            times.started = started
            self._num_prompt += times.num_prompt
            self._histograms["request_queue_time_seconds"].add(started - times.arrived)
            self._not_started.discard(request_id)

    def _note_tokens(self, times: _Times, now: float, count: int, gaps: Counter[float]) -> None:
        if times.first is None:
            times.first = now
            self._histograms["time_to_first_token_seconds"].add(now - times.arrived)
            self._histograms["request_prefill_time_seconds"].add(now - (times.started or times.arrived))
        else:
            gaps[now - times.last] += 1
        times.last = now
        times.num_output += count

    def _finish(self, request_id: str, times: _Times, reason: FinishReason) -> None:
        del self._requests[request_id]
        self._not_started.discard(request_id)
        self._finished[reason.value] += 1
        if times.first is None or reason is FinishReason.ABORT:  # its times mean nothing
            return
        decode = times.last - times.first
        self._histograms["e2e_request_latency_seconds"].add(times.last - times.arrived)
        self._histograms["request_decode_time_seconds"].add(decode)
        self._histograms["request_generation_tokens"].add(times.num_output)
        if times.num_output > 1:
            per_token = decode / (times.num_output - 1)
            self._histograms["request_time_per_output_token_seconds"].add(per_token)

    def _note_rate(self, now: float) -> None:
        """Store the token counts, at most once a second."""
        if now - self._recent[-1][0] >= 1:
            self._recent.append((now, self._num_prompt, self._num_output))
        while len(self._recent) > 2 and now - self._recent[0][0] > RATE_SECONDS:
            self._recent.popleft()

    def load(self) -> dict[str, Any]:
        """Return the current load: requests, slots, prefix cache, tokens per second."""
        now, scheduler = time.monotonic(), self._engine.scheduler
        self._note_rate(now)
        then, prompt, output = self._recent[0]
        seconds = max(now - then, 1e-9)
        kv = scheduler.kv.stats
        used = kv.locked_slots + kv.private_slots
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "server_load": len(scheduler.running) + len(scheduler.waiting),  # vLLM's name
            "waiting_prompt_tokens": sum(len(request.prompt) for request in scheduler.waiting),
            "kv_used_tokens": used,
            "kv_cached_tokens": kv.evictable_slots,
            "kv_pool_tokens": self._info.pool_tokens,
            "kv_usage": kv.usage,
            "prefix_hit_tokens": kv.hit_tokens,
            "prefix_query_tokens": kv.query_tokens,
            "prompt_tokens": self._num_prompt,
            "generation_tokens": self._num_output,
            "prompt_tokens_per_second": (self._num_prompt - prompt) / seconds,
            "generation_tokens_per_second": (self._num_output - output) / seconds,
            "preemptions": scheduler.num_pauses,
            "corrupted": scheduler.num_corrupted,
        }

    def log(self, logger: logging.Logger) -> None:
        """Log the load in one line; log nothing while nothing happens."""
        load = self.load()
        if not (load["running"] or load["waiting"] or load["generation_tokens_per_second"]):
            return
        queried = max(load["prefix_query_tokens"], 1)
        logger.info(
            "Running: %d reqs, Waiting: %d reqs, prompt: %.1f tokens/s, generation: %.1f tokens/s, "
            "KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%",
            load["running"],
            load["waiting"],
            load["prompt_tokens_per_second"],
            load["generation_tokens_per_second"],
            100 * load["kv_usage"],
            100 * load["prefix_hit_tokens"] / queried,
        )

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Any]:
        """Yield all metric families with their current values."""
        load, named, family = self.load(), self.names.labels, self.names.family
        labels, own = list(named), list(named.values())
        gauges = {
            "num_requests_running": ("Requests that run.", load["running"]),
            "num_requests_waiting": ("Requests that wait for their first or next step.", load["waiting"]),
            "kv_cache_usage_perc": (
                "Slots that running requests hold, 1 = all; of the group of layers that is fullest.",
                load["kv_usage"],
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(family(name), text, labels=labels)
            gauge.add_metric(own, value)
            yield gauge
        counters = {
            "num_preemptions": ("Requests paused for lack of slots.", load["preemptions"]),
            "corrupted_requests": (
                "Requests that ended because the model gave NaN or infinity.",
                load["corrupted"],
            ),
            "prefix_cache_queries": ("Prompt tokens looked up.", load["prefix_query_tokens"]),
            "prefix_cache_hits": ("Prompt tokens found.", load["prefix_hit_tokens"]),
            "prompt_tokens": ("Prompt tokens of requests that have been started.", self._num_prompt),
            "generation_tokens": ("Tokens sampled.", self._num_output),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(family(name), text, labels=labels)
            counter.add_metric(own, value)
            yield counter
        success = CounterMetricFamily(
            family("request_success"), "Ended requests.", labels=[*labels, "finished_reason"]
        )
        for reason in FinishReason:
            success.add_metric([*own, reason.value], self._finished[reason.value])
        yield success
        errors = CounterMetricFamily(
            family("request_errors"), "HTTP requests answered by an error.", labels=[*labels, "code"]
        )
        for code, count in sorted(self._errors.items()):
            errors.add_metric([*own, str(code)], count)
        yield errors
        for name, histogram in self._histograms.items():
            buckets = HistogramMetricFamily(family(name), HISTOGRAMS[name][0], labels=labels)
            buckets.add_metric(own, histogram.cumulative(), histogram.sum)
            yield buckets
        config = InfoMetricFamily(family("cache_config"), "The KV pool.", labels=labels)
        config.add_metric(own, self._cache_config())
        yield config

    def _cache_config(self) -> dict[str, str]:
        info = self._info
        values = {
            "kv_dtype": info.kv,
            "pool_tokens": info.pool_tokens,
            "pool_bytes": info.pool_bytes,
            "bytes_per_token": info.kv_bytes_per_token,
            "block_size": BLOCK,
            "num_gpu_blocks": info.pool_tokens // BLOCK,
        }
        return {name: str(value) for name, value in values.items()}
