"""EngineMetrics on what a scheduler says and steps give, without an engine."""

from types import SimpleNamespace

import pytest

from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.serve.link.messages import Add
from qrt.serve.link.metric_names import MetricNames
from qrt.serve.link.metrics import EngineMetrics


class Queue:
    """A scheduler of so many requests, of which the first ones run."""

    def __init__(self, count: int):
        self.scheduler = SimpleNamespace(
            waiting=[SimpleNamespace(id=str(i)) for i in range(count)], running=[]
        )
        self.metrics = EngineMetrics(self, None, MetricNames("model"))
        for i in range(count):
            self.metrics.added(Add(str(i), [5] * (i + 1), {}, arrived=10.0 + i))

    def start(self, count: int):
        self.scheduler.running += self.scheduler.waiting[:count]
        del self.scheduler.waiting[:count]

    def waits(self):
        """Requests that have started, and how long they waited in all."""
        histogram = self.metrics._histograms["request_queue_time_seconds"]
        return sum(histogram.counts), histogram.sum


def test_a_request_waits_until_its_first_step():
    queue = Queue(5)
    queue.metrics.step(20.0, [])
    assert queue.waits() == (0, 0.0)
    queue.start(2)
    queue.metrics.step(21.0, [StepDelta("0", (7,))])
    assert queue.waits() == (2, 11.0 + 10.0)
    queue.metrics.step(22.0, [StepDelta("1", (7,), FinishReason.LENGTH)])
    assert queue.waits() == (2, 21.0), "once"
    queue.scheduler.waiting.pop(0)  # starts and ends in one step
    queue.metrics.step(23.0, [StepDelta("2", (7,), FinishReason.LENGTH)])
    assert queue.waits() == (3, 21.0 + 11.0)
    queue.metrics.ended("3", FinishReason.ABORT)
    queue.metrics.step(24.0, [])
    assert queue.waits() == (3, 32.0)


@pytest.mark.parametrize("running", [0, 3])
def test_metrics_cost_does_not_grow_with_the_queue(count_lines, running):
    counts = []
    for waiting in (10, 2000):
        queue = Queue(running + waiting)
        queue.start(running)
        queue.metrics.step(3000.0, [])
        counts.append(count_lines(queue.metrics.step, 3001.0, [])[0])
    assert max(counts) < 200, "a second that ends in between costs some lines"
