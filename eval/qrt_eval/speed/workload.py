"""Make loads for an engine: which requests `qrt-eval throughput` hands in, and how many at once.

A steady load is one that has always been running. Its first requests, as many as run at once, are in the
middle of their outputs, the oldest first; tokens that are done are part of the prompt. When the last of them
decodes, they are spread evenly. So requests end and begin evenly, contexts have their average length, and
nothing runs in waves.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qrt.engine.engine import Engine
from qrt.errors import ConfigError
from qrt_eval.inputs.lengths import Fixed, Lengths, LoadRequest, facts_of

WARMUP_TOKENS = 4  # that each request of the warm-up decodes
WARMUP_PROMPT_TOKENS = 2**18  # most tokens of all prompts of the warm-up together
PROMPTS_PER_SLOT = 2  # requests per slot of a batch, without --num-prompts: it is refilled once
WAVES = 3  # requests of an IN/OUT load per request that runs at once, without --num-prompts
WINDOW_SECONDS = 30.0  # of a steady load, without --window-seconds
FULL = 0.98  # share of the pool that a steady load's first requests take; the engine keeps some free


@dataclass(frozen=True)
class Workload:
    """Hold requests, and say how they are handed in.

    about           entry of the row: its batch size or its lengths
    in_flight       requests at once; None for all
    first           requests that begin in the middle of their outputs, for a steady load; 0 for none
    window_seconds  the longest steady load, from when all of these decode
    """

    about: dict[str, Any]
    requests: Sequence[LoadRequest]
    in_flight: int | None = None
    first: int = 0
    window_seconds: float = math.inf

    @property
    def name(self) -> str:
        return f"batch {self.in_flight}" if self.in_flight else str(self.about["lengths"]["name"])


def in_batches(engine: Engine, lengths: Lengths, batch: int, arguments: Namespace) -> Workload:
    """Return the load that keeps `batch` requests in flight."""
    count = arguments.num_prompts or PROMPTS_PER_SLOT * batch
    return Workload(
        {"batch": batch}, lengths.requests(count, arguments.seed, engine.model.arch.vocab_size), batch
    )


def all_at_once(engine: Engine, lengths: Lengths, arguments: Namespace) -> Workload:
    """Return the load that hands in all requests at once; a steady one if a window is wanted.

    ConfigError if a steady load has fewer than twice the requests that run at once.
    """
    seed, vocab = arguments.seed, engine.model.arch.vocab_size
    steady = isinstance(lengths, Fixed) if arguments.window is None else arguments.window
    inputs, outputs = lengths.draw(lengths.count or 1, np.random.default_rng(seed)).mean(0)
    at_once = running_at_once(engine, inputs, outputs)
    count = arguments.num_prompts or lengths.count or WAVES * at_once
    if steady and count < 2 * at_once:
        raise ConfigError(
            f"--num-prompts: expected at least {2 * at_once} for {lengths.name}, twice the {at_once} that "
            f"run at once, got {count}; give more, a smaller --max-num-seqs, or --no-window"
        )
    requests = lengths.requests(count, seed, vocab)
    about = facts_of(lengths, [(len(request.ids), request.output_len) for request in requests])
    if steady:
        step_tokens = engine.scheduler.limits.max_num_batched_tokens
        requests = begun(requests, at_once, step_tokens, seed, vocab)
    seconds = arguments.window_seconds or WINDOW_SECONDS
    return Workload({"lengths": about}, requests, None, at_once if steady else 0, seconds)


def running_at_once(engine: Engine, input_len: float, output_len: float) -> int:
    """Return how many requests of these lengths a steady load runs at once.

    They are limited by the engine's setting, by the pool (with half of their outputs done), and by the prompt
    tokens that a step has left for replacing requests that end.
    """
    limits = engine.scheduler.limits
    fit = FULL * engine.pool.fitting(input_len + output_len / 2)
    fed = limits.max_num_batched_tokens * output_len / (input_len + output_len)
    return max(1, int(min(limits.max_num_seqs, fit, fed)))


def begun(
    requests: Sequence[LoadRequest], first: int, step_tokens: int, seed: int, vocab: int
) -> list[LoadRequest]:
    """Return the requests, with the `first` ones in the middle of their outputs.

    When the last of these decodes, they are spread evenly over their outputs, the first one at the end.
    Tokens that a request will have decoded by then are not in its prompt. Prompts are computed in their
    order, `step_tokens` per step, less the decodes of earlier requests.
    """
    random = np.random.default_rng(seed)
    found = list(requests)
    steps = 0.0  # from a request's first token to the last request's
    for index in reversed(range(first)):
        request = found[index]
        age = request.output_len * (first - index - 0.5) / first
        done = max(0, int(age - steps))
        ids = request.ids + random.integers(0, vocab, done).tolist()
        found[index] = LoadRequest(ids, request.output_len - done)
        steps += len(ids) / max(1, step_tokens - index)
    return found


def warmup(engine: Engine, load: Workload) -> list[LoadRequest]:
    """Return the first requests of the load, as many as run at once, with their outputs cut short."""
    most = load.in_flight or engine.scheduler.limits.max_num_seqs
    found: list[LoadRequest] = []
    room = WARMUP_PROMPT_TOKENS
    for request in load.requests[:most]:
        if found and (room := room - len(request.ids)) < 0:
            break
        found.append(LoadRequest(request.ids, min(request.output_len, WARMUP_TOKENS)))
    return found
