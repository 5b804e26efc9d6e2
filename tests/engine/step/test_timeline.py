"""Times of steps from events that are no GPU's."""

import pytest
import torch

from qrt.engine.step import timeline as module
from qrt.engine.step.timeline import StepKind, Timeline
from qrt.offline.llm import LLM
from qrt.request.sampling import SamplingParams

DECODES, PROMPTS, LAUNCHED = StepKind(False, True), StepKind(True, True), StepKind(True, False)


class Event:
    """Recorded at the time that is set; known once it, or a later one, has been waited for."""

    now, known, made = 0.0, 0.0, 0

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1

    def record(self):
        self.time = Event.now

    def synchronize(self):
        Event.known = max(Event.known, self.time)

    def query(self):
        return self.time <= Event.known

    def elapsed_time(self, other):
        assert max(self.time, other.time) <= Event.known
        return other.time - self.time


@pytest.fixture(autouse=True)
def events(monkeypatch):
    """It waits for what it reads, on whatever device that is: not for the thread's current one."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    Event.now = Event.known = 0.0
    Event.made = 0


def run(timeline, steps):
    """Steps (kind, wait before it, time it works, ...), the GPU's clock moving on."""
    for kind, wait, busy, *rest in steps:
        Event.now += wait
        timeline.begin()
        Event.now += busy
        timeline.end(kind, *(rest or (0.0, 1, 0)))


def test_nothing_ran():
    assert Timeline().summary() == {"host_gap": 0.0, "decode_host_gap": 0.0, "steps": []}


def test_a_table_by_kind_adds_up():
    timeline = Timeline()
    run(
        timeline,
        [(PROMPTS, 7, 10, 0.001, 0, 512), (DECODES, 1, 4, 0.002, 3, 0), (DECODES, 0, 4, 0.004, 4, 0),
         (LAUNCHED, 2, 50, 0.050, 4, 900)],
    )  # fmt: skip
    found = timeline.summary()
    assert found["host_gap"] == pytest.approx(3 / 71)  # what comes before the first step is no step's
    launched, prompts, decodes = found["steps"]  # in the order of their time
    assert launched == {
        "prompts": True, "recorded": False, "count": 1, "share": 52 / 71, "ms": 52, "wait_ms": 2,
        "host_ms": 50, "decodes": 4, "prompt_tokens": 900,
    }  # fmt: skip
    assert (prompts["ms"], prompts["wait_ms"], prompts["prompt_tokens"]) == (10, 0, 512)
    assert decodes["count"] == 2 and decodes["ms"] == 4.5 and decodes["decodes"] == 3.5
    assert decodes["host_ms"] == pytest.approx(3)
    assert sum(row["share"] for row in found["steps"]) == pytest.approx(1)
    assert sum(row["count"] * row["ms"] for row in found["steps"]) == 71


@pytest.mark.parametrize(
    "steps, want",
    [
        ([(DECODES, 0, 1), (DECODES, 1, 1), (PROMPTS, 5, 9), (DECODES, 3, 1)], 1 / 4),
        ([(PROMPTS, 0, 1), (PROMPTS, 1, 1)], 0.0),
        ([(DECODES, 0, 1)], 0.0),
    ],
)
def test_decode_gaps_exclude_other_steps(steps, want):
    timeline = Timeline()
    run(timeline, steps)
    assert timeline.summary()["decode_host_gap"] == want


def test_a_long_run_keeps_few_events_and_waits_for_none(monkeypatch):
    timeline = Timeline()

    def wait(event):
        raise AssertionError("a step waited for the GPU")

    synchronize = Event.synchronize
    monkeypatch.setattr(Event, "synchronize", wait)
    for _ in range(1000):
        run(timeline, [(DECODES, 1, 3)])
        Event.known = Event.now - 8  # the GPU is two steps behind
    monkeypatch.setattr(Event, "synchronize", synchronize)
    assert Event.made <= 2 * module.PENDING + 4
    found = timeline.summary()
    assert found["steps"][0]["count"] == 1000 and found["host_gap"] == pytest.approx(999 / 3999)
    assert found["decode_host_gap"] == found["host_gap"]
    run(timeline, [(DECODES, 1, 3)])  # a summary does not end it
    assert timeline.summary()["steps"][0]["count"] == 1001


def test_a_step_that_failed_leaves_nothing():
    timeline = Timeline()
    timeline.begin()
    run(timeline, [(DECODES, 5, 3), (DECODES, 0, 3)])
    assert timeline.summary()["steps"][0]["ms"] == 3


@pytest.mark.model
def test_timeline_counts_every_token_once():
    """Every prompt token and every decode is in one step's count."""
    engine = LLM("tiny", enable_prefix_caching=False, max_num_batched_tokens=16, device="cpu").engine
    timeline = engine.start_timeline()
    for name, (size, outputs) in {"a": (20, 5), "b": (9, 3), "c": (3, 4)}.items():
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        engine.add(name, list(range(5, 5 + size)), params)
    while engine.has_work:
        Event.now += 1
        engine.step()
    rows = {row["prompts"]: row for row in timeline.summary()["steps"]}
    assert not any(row["recorded"] for row in rows.values())  # nothing is on a CPU
    totals = {
        key: sum(row["count"] * row[key] for row in rows.values()) for key in ("decodes", "prompt_tokens")
    }
    assert totals["prompt_tokens"] == pytest.approx(20 + 9 + 3)
    assert totals["decodes"] == pytest.approx(5 + 3 + 4 - 3)  # the first token comes with the prompt
    assert rows[False]["prompt_tokens"] == 0 < rows[True]["prompt_tokens"]
    assert all(row["host_ms"] > 0 for row in rows.values())


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.parametrize("eager", [False, True])
def test_timeline_separates_recorded_and_launched_steps(monkeypatch, eager):
    monkeypatch.undo()  # the GPU has events of its own
    engine = LLM("tiny", max_num_seqs=4, max_model_len=128, enforce_eager=eager).engine
    timeline = engine.start_timeline()
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    for name in "abc":
        engine.add(name, [5, 6, 7], params)
    while engine.has_work:
        engine.step()
    found = timeline.summary()
    rows = {row["prompts"]: row for row in found["steps"]}
    assert [row["recorded"] for row in rows.values()] == [not eager] * 2
    assert rows[False]["count"] == 89 and rows[True]["prompt_tokens"] * rows[True]["count"] == 9
    assert all(row["ms"] > row["wait_ms"] >= 0 and row["host_ms"] > 0 for row in rows.values())
    assert 0 <= found["host_gap"] < 1 and 0 <= found["decode_host_gap"] < 1
