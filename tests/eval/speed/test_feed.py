"""Test feeding an engine: what is handed in when, and what is counted."""

import itertools
from types import SimpleNamespace

import pytest

from qrt import LLM
from qrt_eval.inputs.lengths import Fixed, LoadRequest
from qrt_eval.speed import feed as module
from qrt_eval.speed.feed import feed

pytestmark = pytest.mark.model


@pytest.fixture
def engine():
    return LLM("tiny", enable_prefix_caching=False, max_num_seqs=4, device="cpu").engine


@pytest.mark.parametrize("in_flight, most", [(2, 2), (None, 5)])
def test_requests_in_flight_are_bounded(engine, in_flight, most):
    handed, add = [], engine.add

    def counted(*args, **options):
        add(*args, **options)
        scheduler = engine.scheduler
        handed.append(len(scheduler.running) + len(scheduler.waiting))

    engine.add = counted
    run = feed(engine, [LoadRequest([5, 6, 7], 4)] * 5, in_flight)
    assert max(handed) == most and len(handed) == 5 and run.running == min(most, 4)
    total = run.total
    assert (total.output_tokens, total.started, total.finished, run.input_tokens) == (20, 5, 5, 15)
    # each output token attends to the prompt and the earlier outputs
    assert total.kv_tokens == 5 * (3 + 4 + 5 + 6)
    assert 20 / run.running <= total.steps <= 5 * 4 and run.window is None and run.timeline is None


def test_each_request_has_its_length(engine):
    lengths = [(3, 1), (20, 7), (1, 4)]
    run = feed(engine, [LoadRequest([5] * size, out) for size, out in lengths])
    assert run.total.output_tokens == 12 and run.input_tokens == 24
    assert run.total.kv_tokens == sum(size + i for size, out in lengths for i in range(out))


def test_window_is_where_all_run_and_some_wait(engine):
    """Follow the definition, from the deltas of each step."""
    said, step = [], engine.step

    def noted():
        deltas = step()
        said.append(([delta.request_id for delta in deltas], len(engine.scheduler.waiting)))
        return deltas

    engine.step = noted
    run = feed(engine, Fixed(9, 6).requests(12, 0, 500), first=3)
    heard = [set().union(*(ids for ids, _ in said[: i + 1])) for i in range(len(said))]
    begin = next(i for i, names in enumerate(heard) if {"feed-0", "feed-1", "feed-2"} <= names)
    end = next(i for i, (_, waiting) in enumerate(said) if i > begin and not waiting)
    inside = said[begin + 1 : end + 1]
    assert inside and run.window.steps == len(inside)
    assert run.window.output_tokens == sum(len(ids) for ids, _ in inside)
    assert run.window.started == said[begin][1] and 0 < run.window.seconds < run.total.seconds


def test_timed_window_ends_and_empties_the_engine(engine, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    requests = Fixed(9, 50).requests(12, 0, 500)
    run = feed(engine, requests, first=4, window_seconds=20)
    assert run.total.seconds == 21 and run.total.started == 4 and run.total.finished == 0
    assert run.total.output_tokens == 4 * run.total.steps and run.input_tokens == 4 * 9
    assert run.window.seconds == 20 and run.window.output_tokens == run.total.output_tokens - 4
    assert not engine.has_work
    assert feed(engine, requests[:2]).total.output_tokens == 100
