"""Times of steps from events that are no GPU's."""

import pytest
import torch

from qrt.engine.timeline import Timeline


class Event:
    """Recorded a second after the one before; its time is known when it, or a later one, was waited for."""

    now, known = 0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.now += 1
        self.time = Event.now

    def synchronize(self):
        Event.known = max(Event.known, self.time)

    def elapsed_time(self, other):
        assert max(self.time, other.time) <= Event.known
        return other.time - self.time


@pytest.mark.parametrize(
    "runs, want", [([2, 0, 1], (3, 1.0, 0.25)), ([], (0, 0.0, 0.0)), ([0], (0, 0.0, 0.0))]
)
def test_summary(monkeypatch, runs, want):
    """It waits for what it reads, on whatever device that is: not for the thread's current one."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timeline = Timeline()
    for steps in runs:
        for _ in range(steps):
            timeline.begin()
            timeline.end()
        timeline.cut()
    assert timeline.summary() == dict(zip(("steps", "step_ms", "host_gap"), want, strict=True))
