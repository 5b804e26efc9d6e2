"""Timeline: measure the steps that the GPU runs, and how long it waits between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

PENDING = 64  # steps whose events are kept; when there are more, the older half is summed up


class StepKind(NamedTuple):
    """Whether a step has prompts, and whether it is recorded or launched kernel by kernel."""

    prompts: bool
    recorded: bool


@dataclass
class Sums:
    """Sums over the steps of one kind. `span_ms` is `busy_ms` plus the wait before each step."""

    count: int = 0
    span_ms: float = 0.0
    busy_ms: float = 0.0
    host_ms: float = 0.0
    decodes: int = 0
    prompt_tokens: int = 0


class _Step(NamedTuple):
    kind: StepKind
    start: torch.cuda.Event
    end: torch.cuda.Event
    host_ms: float
    decodes: int
    prompt_tokens: int


class Timeline:
    """Records events around each step, from its first kernel to its last.

    Events are read in batches when they are done, and reused. So no step waits for them, and a long run keeps
    few. A step's span goes from the end of the step before it to its own end: spans add up to the whole time,
    and a wait counts for the step that the GPU waited for. Waits between the kernels of one step are not
    seen. A step that is launched kernel by kernel and takes about its host time has such waits.
    """

    def __init__(self) -> None:
        self.kinds: dict[StepKind, Sums] = {}
        self._free: list[torch.cuda.Event] = []
        self._start: torch.cuda.Event | None = None  # start of the step that is being launched
        self._pending: deque[_Step] = deque()
        self._last: _Step | None = None  # the last step that has been summed up
        self._decode_busy_ms = self._decode_wait_ms = 0.0

    def begin(self) -> None:
        """Record the start of a step, whose first kernel is launched next."""
        self._start = self._start or self._event()  # a step that failed leaves its event
        self._start.record()

    def end(self, kind: StepKind, host_s: float, decodes: int, prompt_tokens: int) -> None:
        """Record the end of a step, whose last kernel has been launched in `host_s` seconds."""
        assert self._start is not None, "end without begin"
        end = self._event()
        end.record()
        self._pending.append(_Step(kind, self._start, end, 1e3 * host_s, decodes, prompt_tokens))
        self._start = None
        if len(self._pending) > PENDING and self._pending[PENDING // 2].end.query():
            self._add_up(PENDING // 2)

    def summary(self) -> dict[str, Any]:
        """Wait for the last step and return what all steps took.

        host_gap          share of the whole time in which the GPU waits between two steps
        decode_host_gap   the same for decode steps, without waits before and after steps with prompts
        steps             per kind, the one with the most time first: `count`, `share` of the time, and means
                          per step: `ms` from step to step, `wait_ms` before it, `host_ms` to launch it,
                          `decodes` and `prompt_tokens`
        """
        if self._pending:
            self._pending[-1].end.synchronize()
            self._add_up(len(self._pending))
        spans = sum(sums.span_ms for sums in self.kinds.values())
        waits = spans - sum(sums.busy_ms for sums in self.kinds.values())
        of_decodes = self._decode_busy_ms + self._decode_wait_ms
        ordered = sorted(self.kinds.items(), key=lambda item: -item[1].span_ms)
        return {
            "host_gap": waits / spans if spans else 0.0,
            "decode_host_gap": self._decode_wait_ms / of_decodes if of_decodes else 0.0,
            "steps": [_row(kind, sums, spans) for kind, sums in ordered],
        }

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def _add_up(self, count: int) -> None:
        """Add the oldest `count` steps to the sums and free their events, except the last one."""
        for _ in range(count):
            step, before = self._pending.popleft(), self._last
            busy, wait = step.start.elapsed_time(step.end), 0.0
            self._free.append(step.start)
            if before is not None:
                wait = before.end.elapsed_time(step.start)
                self._free.append(before.end)
            if not step.kind.prompts:
                self._decode_busy_ms += busy
                self._decode_wait_ms += wait if before is not None and not before.kind.prompts else 0.0
            sums = self.kinds.setdefault(step.kind, Sums())
            sums.count += 1
            sums.span_ms += wait + busy
            sums.busy_ms += busy
            sums.host_ms += step.host_ms
            sums.decodes += step.decodes
            sums.prompt_tokens += step.prompt_tokens
            self._last = step


def _row(kind: StepKind, sums: Sums, spans_ms: float) -> dict[str, Any]:
    count = sums.count
    return {
        "prompts": kind.prompts,
        "recorded": kind.recorded,
        "count": count,
        "share": sums.span_ms / spans_ms if spans_ms else 0.0,
        "ms": sums.span_ms / count,
        "wait_ms": (sums.span_ms - sums.busy_ms) / count,
        "host_ms": sums.host_ms / count,
        "decodes": sums.decodes / count,
        "prompt_tokens": sums.prompt_tokens / count,
    }
