"""Test loads: how many requests a steady one runs, and how its first ones begin."""

from types import SimpleNamespace

import numpy as np
import pytest

from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.plan import StepResult
from qrt.engine.schedule.scheduler import Scheduler
from qrt.mem.manager import KVManager
from qrt.mem.sizing import PoolSize
from qrt_eval.inputs.lengths import Fixed
from qrt_eval.speed import feed
from qrt_eval.speed.workload import FULL, Workload, begun, running_at_once, warmup


def engine(seqs=10**6, slots=10**9, tokens=10**9):
    limits = SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    return SimpleNamespace(scheduler=SimpleNamespace(limits=limits), pool=PoolSize(slots, 0, "fp16", 4096))


def test_running_requests_are_limited():
    """Of 2,048 tokens in and 128 out, K/V take 2,112 tokens on average.

    A step of 8,192 tokens in which R decode brings (8,192 - R) / 2,048 new requests and ends R / 128. These
    are equal at R = 481.9.
    """
    assert running_at_once(engine(seqs=100), 2048, 128) == 100
    assert running_at_once(engine(slots=211_200), 2048, 128) == int(100 * FULL)
    assert running_at_once(engine(tokens=8192), 2048, 128) == 481
    assert running_at_once(engine(slots=5), 2048, 128) == 1


def test_steady_load_begins_spread_over_its_outputs():
    """Steps have 100 tokens; prompts run in order, beside the decodes of earlier requests.

    When the tenth begins, the first is at its end, and each later one is 5 tokens younger.
    """
    plain = Fixed(17, 50).requests(25, 3, 1000)
    found = begun(plain, 10, 100, 3, 1000)
    assert found[10:] == plain[10:] and begun(plain, 10, 100, 3, 1000) == found
    for request, before in zip(found, plain, strict=True):
        assert request.ids[:17] == before.ids and len(request.ids) + request.output_len == 67
        assert max(request.ids) < 1000 and request.output_len > 0
    steps, ages = 0.0, []
    for index, request in enumerate(found[:10]):
        steps += len(request.ids) / (100 - index)
        ages.append((50 - request.output_len, steps))
    assert [done + steps - at for done, at in ages] == pytest.approx([47.5 - 5 * i for i in range(10)], abs=2)


class Simulated:
    """Run the real scheduler on a simulated clock.

    A step takes some time, and more for each of its tokens and for the positions that its decodes attend to.
    """

    STEP, TOKEN, ATTENDED = 8e-3, 14e-5, 15e-8

    def __init__(self, slots, seqs, tokens, longest):
        limits = Limits(longest, seqs, tokens)
        self.scheduler = Scheduler(KVManager(slots, prefix_caching=False), limits, (), 0)
        self.model = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self.pool = PoolSize(slots, 0, "fp16", longest)
        self.seconds, self.contexts = 0.0, {}

    @property
    def has_work(self):
        return self.scheduler.has_work

    def clear(self):
        """Do nothing; the engine is not used afterwards."""

    def add(self, name, ids, params):
        self.scheduler.add(name, np.array(ids, np.int32), params)

    def step(self):
        plan = self.scheduler.plan()
        self.contexts |= {chunk.request_id: chunk.end for chunk in plan.chunks}
        for decode in plan.decodes:
            self.contexts[decode.request_id] += 1
        attended = sum(self.contexts[decode.request_id] for decode in plan.decodes)
        tokens = len(plan.decodes) + sum(len(chunk.tokens) for chunk in plan.chunks)
        self.seconds += self.STEP + self.TOKEN * tokens + self.ATTENDED * attended
        return self.scheduler.commit(plan, StepResult([5] * len(plan.sampled)))


@pytest.mark.parametrize(
    "inputs, outputs, seqs", [(13, 13, 205), (100, 100, 60), (200, 13, 205), (500, 50, 205)]
)
def test_window_rate_equals_an_endless_load(monkeypatch, inputs, outputs, seqs):
    """In each step as many requests begin as end: R / outputs of the R that run.

    Each has all tokens but the last to compute, and attends to half of its outputs on average.
    """
    engine = Simulated(17_500, seqs, 819, inputs + outputs)
    monkeypatch.setattr(feed, "time", SimpleNamespace(perf_counter=lambda: engine.seconds))
    first = running_at_once(engine, inputs, outputs)
    requests = begun(Fixed(inputs, outputs).requests(3 * first, 0, 50), first, 819, 0, 50)
    window = feed.feed(engine, requests, first=first).window
    tokens = first * (inputs + outputs - 1) / outputs
    attended = first * (inputs + outputs / 2)
    want = first / (engine.STEP + engine.TOKEN * tokens + engine.ATTENDED * attended)
    assert window.output_tokens / window.seconds == pytest.approx(want, rel=0.03)
    assert window.started * outputs == pytest.approx(window.output_tokens, rel=0.03)


@pytest.mark.parametrize("in_flight, want", [(3, 3), (None, 6)])
def test_a_warm_up_is_short(monkeypatch, in_flight, want):
    requests = Fixed(10, 9).requests(20, 0, 50)
    load = Workload({"batch": 3}, requests, in_flight)
    found = warmup(engine(seqs=6), load)
    assert [request.ids for request in found] == [request.ids for request in requests[:want]]
    assert {request.output_len for request in found} == {4}
    monkeypatch.setattr("qrt_eval.speed.workload.WARMUP_PROMPT_TOKENS", 25)
    assert 1 <= len(warmup(engine(seqs=6), load)) <= 3
    monkeypatch.setattr("qrt_eval.speed.workload.WARMUP_PROMPT_TOKENS", 1)
    assert len(warmup(engine(seqs=6), load)) == 1
