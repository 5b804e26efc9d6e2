"""Feed requests to an engine as fast as it takes them, and count what it does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

from qrt.engine.engine import Engine
from qrt.engine.schedule.output import StepDelta
from qrt.errors import QrtError
from qrt.gc import short_collections
from qrt.request.sampling import SamplingParams
from qrt_eval.inputs.lengths import LoadRequest


@dataclass
class Tally:
    """Count what a run, or a part of it, has done.

    started     requests that have left the queue
    kv_tokens   positions that the decoded tokens attended to, in sum
    """

    seconds: float = 0.0
    steps: int = 0
    started: int = 0
    finished: int = 0
    output_tokens: int = 0
    kv_tokens: int = 0

    def since(self, before: Tally) -> Tally:
        """Return what was done after `before`."""
        return Tally(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class Feed:
    """Hold the counts of one pass over requests.

    input_tokens   tokens of all requests that were started
    running        the most requests that ran at once
    window         the steady part; None if none was asked for or it never began
    timeline       the summary of the steps' `Timeline`; None on a CPU
    """

    total: Tally
    input_tokens: int
    running: int
    window: Tally | None
    timeline: dict[str, Any] | None


@short_collections()
def feed(
    engine: Engine,
    requests: Sequence[LoadRequest],
    in_flight: int | None = None,
    *,
    first: int = 0,
    window_seconds: float = math.inf,
) -> Feed:
    """Run requests greedily to their lengths, `in_flight` handed in at once (None: all).

    The window of a steady load begins after the step in which the last of the `first` requests has decoded.
    It ends after the step that leaves no request waiting, or after `window_seconds`; the rest is dropped
    then.
    """
    waiting, lengths = iter(enumerate(requests)), dict[str, int]()
    unheard = {_name(index) for index in range(first)}
    begin: Tally | None = None
    tally, running = Tally(), 0
    timeline = engine.start_timeline() if engine.model.device.type == "cuda" else None
    began = time.perf_counter()
    added = _add(engine, waiting, lengths, in_flight)
    while engine.has_work:
        deltas, finished = step(engine), tally.finished
        _count(tally, deltas, lengths)
        running = max(running, len(engine.scheduler.running) + tally.finished - finished)
        added += _add(engine, waiting, lengths, in_flight)
        tally.started = added - len(engine.scheduler.waiting)
        tally.seconds = time.perf_counter() - began
        if unheard:
            unheard.difference_update(delta.request_id for delta in deltas)
            begin = None if unheard else replace(tally)
        elif begin and (not engine.scheduler.waiting or tally.seconds - begin.seconds >= window_seconds):
            engine.clear()
            break
    window = tally.since(begin) if begin else None
    inputs = sum(len(request.ids) for request in requests[: tally.started])
    return Feed(tally, inputs, running, window, timeline.summary() if timeline else None)


def step(engine: Engine) -> list[StepDelta]:
    """Run the engine's next step and return its deltas; QrtError if it failed."""
    deltas = engine.step()
    if failed := [delta.error for delta in deltas if delta.error]:
        raise QrtError(f"a step failed: {failed[0]}")
    return deltas


def _add(
    engine: Engine, waiting: Iterator[tuple[int, LoadRequest]], lengths: dict[str, int], in_flight: int | None
) -> int:
    """Hand in requests until `in_flight` are there; return how many."""
    count = len(lengths)
    room = None if in_flight is None else in_flight - count
    for index, request in islice(waiting, room):
        engine.add(_name(index), request.ids, _greedy(request.output_len))
        lengths[_name(index)] = len(request.ids)
    return len(lengths) - count


def _count(tally: Tally, deltas: Sequence[StepDelta], lengths: dict[str, int]) -> None:
    """Add a step's deltas to `tally`, and its tokens to the `lengths` of the requests in flight."""
    tally.steps += bool(deltas)
    for delta in deltas:
        count = len(delta.token_ids)
        tally.output_tokens += count
        tally.kv_tokens += lengths[delta.request_id] * count
        lengths[delta.request_id] += count
        if delta.finish_reason:
            tally.finished += 1
            del lengths[delta.request_id]


def _name(index: int) -> str:
    return f"feed-{index}"


@cache
def _greedy(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
