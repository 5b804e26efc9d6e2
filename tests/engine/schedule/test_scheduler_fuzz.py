"""The scheduler alone for thousands of steps, one launched ahead, against a device that checks the plans.

The device knows only what plans tell it. It notes who wrote each slot, so a slot given to two requests, a
position whose slot it was never told, or a read of what somebody else has overwritten fails at once.
"""

import random
from collections import deque

import numpy as np
import pytest

from qrt.engine.schedule import lookahead
from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.plan import Chunk, StepResult
from qrt.engine.schedule.scheduler import Scheduler
from qrt.errors import QueueFullError
from qrt.mem.manager import KVManager
from qrt.request.sampling import SamplingParams

EOS = 3
VOCAB = 11
WIDTH = 256


class Device:
    """Slot tables by row, and what lies in each slot: the tokens of a sequence up to it, as a running
    hash."""

    def __init__(self, rows, slots):
        self.table = np.full((rows, WIDTH), -1)
        self.length = np.zeros(rows, int)
        self.last = np.zeros(rows, int)
        self.content = np.full(slots, -1)

    def run(self, plan, rng):
        """One token for each of `plan.sampled`; the hash chain makes every read a check of all before it."""
        for new in plan.placed:
            self.table[new.row, new.start : new.start + len(new.slots)] = new.slots
        written, tokens = [], []
        for work in plan.works:
            row = work.row
            if isinstance(work, Chunk):
                start, ids = work.start, work.tokens.tolist()
            else:
                start, ids = int(self.length[row]) - 1, [int(self.last[row])]
            written += self.table[row, start : start + len(ids)].tolist()
            self.compute(row, start, ids)
            if not isinstance(work, Chunk) or work.samples:
                tokens.append(rng.randrange(VOCAB))
                self.last[row], self.length[row] = tokens[-1], start + len(ids) + 1
        assert -1 not in written and len(set(written)) == len(written), "a slot of two requests"
        return StepResult(tokens)

    def compute(self, row, start, ids):
        before = self.content[self.table[row, start - 1]] if start else 0
        assert before != -1, "a prefix that was never written"
        for position, token in enumerate(ids, start):
            before = hash((int(before), token)) & 0xFFFFFFFF
            self.content[self.table[row, position]] = before

    def check(self, row, ids):
        """The slots of a running request hold the K/V of its own tokens."""
        state = 0
        for position, token in enumerate(ids):
            state = hash((state, int(token))) & 0xFFFFFFFF
            assert self.content[self.table[row, position]] == state, f"position {position} was overwritten"


def random_request(rng, shared):
    prefix = rng.choice(shared)[: rng.choice([0, 20, 60])]
    prompt = np.array(prefix + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))], np.int32)
    params = SamplingParams(
        max_tokens=rng.choice([1, 3, 40, 120, None]),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=[5] if rng.random() < 0.2 else [],
    )
    return prompt, params


@pytest.mark.parametrize("steps", [4000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_steps(seed, steps, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(lookahead, "GROW_TOKENS", rng.choice([1, 4, 16]))
    monkeypatch.setattr(lookahead, "GROWN_AT_ONCE", rng.choice([1, 3, 64]))
    pool, rows = rng.choice([300, 600, 1500]), rng.choice([4, 16, 40])
    kv = KVManager(pool, prefix_caching=seed != 1, run=rng.choice([1, 16]))
    limits = Limits(200, rows, rng.choice([8, 64, 300]), max_num_queued_reqs=30)
    scheduler = Scheduler(kv, limits, [EOS], conservative=seed == 3)
    device, launched = Device(rows, kv.num_slots), deque()
    shared = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(4)]
    live, ended, refused, count = {}, 0, 0, 0
    for step in range(steps):
        arrivals = rng.random() < 0.5 if step % 1000 < 700 else step % 1000 < 710  # busy, then nearly idle
        if arrivals:
            prompt, params = random_request(rng, shared)
            count += 1
            try:
                scheduler.add(
                    str(count),
                    prompt,
                    params,
                    priority=rng.randrange(3) if seed % 2 == 0 else 0,
                    cache_salt=rng.choice([None, None, "s"]),
                    generate=rng.random() > 0.05,
                )
                live[str(count)] = prompt
            except QueueFullError:
                refused += 1
        if live and rng.random() < 0.02:
            gone = rng.choice(list(live))
            scheduler.abort(gone)
            del live[gone]
        plan = scheduler.plan()
        deltas = []
        if plan is not None:
            placed, works = ({each.row for each in part} for part in (plan.placed, plan.works))
            assert placed <= works, "should the step fail, a request that goes on would not know its slots"
        if plan is not None and rng.random() < 0.002:  # a launch that fails: the one before it ends first
            while launched:
                deltas += scheduler.commit(*launched.popleft())
            deltas += scheduler.fail("injected")
        elif plan is not None:
            launched.append((plan, device.run(plan, rng)))
        while launched and (plan is None or len(launched) > 1):
            deltas += scheduler.commit(*launched.popleft())
        for delta in deltas:
            assert delta.request_id in live, "answered twice, or after it was aborted"
            if delta.finish_reason:
                del live[delta.request_id]
                ended += 1
        if step % 50 == 0:
            kv.check()
            assert scheduler.waiting.num_tokens == sum(request.length for request in scheduler.waiting)
            for request in scheduler.running:
                done = min(request.num_computed, len(request.ids))
                device.check(request.row, request.ids[:done])
    while scheduler.has_work or launched:
        if (plan := scheduler.plan()) is not None:
            launched.append((plan, device.run(plan, rng)))
        else:
            assert launched, "requests that can never run"
        while launched and (plan is None or len(launched) > 1):
            for delta in scheduler.commit(*launched.popleft()):
                if delta.finish_reason:
                    del live[delta.request_id]
    assert not live and ended > steps // 50 and kv.available == kv.num_slots
    assert len(scheduler._rows) == min(rows, limits.max_num_batched_tokens)
    if seed == 3:
        assert scheduler.num_pauses == 0


def test_large_request_is_not_starved_by_small_ones():
    """First come, first served: a long prompt that does not fit yet is not overtaken for ever."""
    rng = random.Random(0)
    kv = KVManager(256, run=1)
    scheduler = Scheduler(kv, Limits(250, 8, 64), [EOS])
    for i in range(4):
        scheduler.add(f"early {i}", np.full(20, i, np.int32), SamplingParams(max_tokens=30, ignore_eos=True))
    scheduler.add(
        "long", np.arange(200, dtype=np.int32) % VOCAB, SamplingParams(max_tokens=20, ignore_eos=True)
    )
    device, done = Device(8, 256), []
    for step in range(400):
        prompt = np.array([rng.randrange(VOCAB) for _ in range(10)], np.int32)
        scheduler.add(f"late {step}", prompt, SamplingParams(max_tokens=30, ignore_eos=True))
        plan = scheduler.plan()
        done += [d.request_id for d in scheduler.commit(plan, device.run(plan, rng)) if d.finish_reason]
    assert "long" in done and not [name for name in done[: done.index("long")] if name.startswith("late")]
