"""Timeline: how long the GPU works on steps of decodes, and how long it waits between them."""

from __future__ import annotations

import torch


class Timeline:
    """Events around each step of decodes alone, from its first kernel to its last; read when all is done.

    Steps of prefill lie between runs of such steps and are left out, with the time before and after them.
    """

    def __init__(self) -> None:
        self._runs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[]]

    def begin(self) -> None:
        """A step of decodes starts here."""
        self._runs[-1].append((_now(), torch.cuda.Event(enable_timing=True)))

    def end(self) -> None:
        """It ends here."""
        self._runs[-1][-1][1].record()

    def cut(self) -> None:
        """Something else comes next."""
        if self._runs[-1]:
            self._runs.append([])

    def summary(self) -> dict[str, float]:
        """`steps`; `step_ms`, the mean time that one works; `host_gap`, the share of the time in which the
        GPU waits between two of them. Waits for the last of them."""
        busy, idle, steps = 0.0, 0.0, 0
        for run in filter(None, self._runs):
            run[-1][1].synchronize()
            busy += sum(start.elapsed_time(end) for start, end in run)
            idle += sum(a[1].elapsed_time(b[0]) for a, b in zip(run, run[1:], strict=False))
            steps += len(run)
        total = busy + idle
        return {
            "steps": steps,
            "step_ms": busy / steps if steps else 0.0,
            "host_gap": idle / total if total else 0.0,
        }


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
