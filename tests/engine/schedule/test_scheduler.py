"""The scheduler alone: order, budget, room, refusals."""

import numpy as np
import pytest

from qrt.engine.schedule import admission, lookahead
from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.plan import StepResult
from qrt.engine.schedule.rows import PATIENCE
from qrt.engine.schedule.scheduler import Scheduler
from qrt.engine.step.profile import largest_plan
from qrt.errors import ConfigError
from qrt.mem.manager import KVManager
from qrt.request.sampling import SamplingParams

LONG = SamplingParams(max_tokens=50)


def make(slots=256, max_model_len=128, max_num_seqs=4, budget=16, **options):
    manager = KVManager(slots, **options)
    return Scheduler(manager, Limits(max_model_len, max_num_seqs, budget))


def ids(*values):
    return np.array(values, np.int32)


def step(scheduler, token=1):
    plan = scheduler.plan()
    return plan, scheduler.commit(plan, StepResult([token] * len(plan.sampled)))


def shape(plan):
    return [d.request_id for d in plan.decodes], [(c.request_id, c.start, len(c.tokens)) for c in plan.chunks]


def test_first_come_first_served_in_chunks_within_the_budget():
    scheduler = make()
    scheduler.add("a", np.arange(20, dtype=np.int32), LONG)
    scheduler.add("b", np.arange(50, 60, dtype=np.int32), LONG)
    scheduler.add("c", ids(7, 8), LONG)
    plans = [step(scheduler)[0] for _ in range(4)]
    assert [shape(plan) for plan in plans] == [
        ([], [("a", 0, 16)]),
        ([], [("a", 16, 4), ("b", 0, 10), ("c", 0, 2)]),
        (["a", "b", "c"], []),
        (["a", "b", "c"], []),
    ]
    assert [[c.samples for c in plan.chunks] for plan in plans[:2]] == [[False], [True, True, True]]
    assert [new.row for new in plans[0].admitted] == [plans[0].chunks[0].row]
    assert len({work.row for work in plans[2].decodes}) == 3


def test_a_pool_for_all_requests_admits_all_at_once():
    """Slots that running requests hold ahead of their tokens are not counted as wanted once more."""
    scheduler = make(slots=8 * 128, max_model_len=128, max_num_seqs=8, budget=100, prefix_caching=False)
    for i in range(8):
        scheduler.add(str(i), np.arange(78, dtype=np.int32), LONG)
    for _ in range(10):
        plan, _ = step(scheduler)
    assert len(plan.decodes) == 8 and scheduler.num_pauses == 0


def test_requests_that_come_at_once_share_steps(count_lines):
    """A step that starts 256 of them looks at each pair for a moment only."""
    scheduler, rng = make(slots=1 << 16, max_num_seqs=256, budget=256 * 64), np.random.default_rng(0)
    for i in range(256):
        scheduler.add(str(i), rng.integers(0, 1000, 64, dtype=np.int32), LONG)
    lines, plan = count_lines(scheduler.plan)
    assert len(plan.chunks) == 256 and lines < 5 * 256**2 / 2


def test_adding_requests_beside_a_thousand_stays_cheap(count_lines):
    """Those that run are looked at once a plan, not once for each that joins."""
    running, joining = 1000, 40
    scheduler, rng = make(1 << 17, max_num_seqs=2000, budget=1 << 16), np.random.default_rng(0)
    prompts = rng.integers(0, 1000, (running + joining, 64), dtype=np.int32)
    for i in range(running):
        scheduler.add(str(i), prompts[i], LONG)
    for _ in range(3):  # all have slots for some tokens then
        step(scheduler)
    lines, plan = count_lines(scheduler.plan)
    assert len(plan.decodes) == running and lines < 15 * running
    lines, _ = count_lines(scheduler.commit, plan, StepResult([1] * running))
    assert lines < 15 * running
    for i in range(running, running + joining):
        scheduler.add(str(i), prompts[i], LONG)
    lines, plan = count_lines(scheduler.plan)
    assert len(plan.chunks) == joining and lines < 20 * running + 300 * joining


def test_request_starts_when_the_expected_peak_fits():
    """At first both might need 127 slots at once, those given ahead included; ten tokens later, 117."""
    scheduler = make(slots=120, budget=100, prefix_caching=False)
    scheduler.add("a", np.arange(50, dtype=np.int32), SamplingParams(max_tokens=20, ignore_eos=True))
    scheduler.add("b", np.arange(60, 80, dtype=np.int32), SamplingParams(max_tokens=60, ignore_eos=True))
    steps = [shape(step(scheduler)[0]) for _ in range(20)]
    assert steps[0] == ([], [("a", 0, 50)])
    assert (["a"], [("b", 0, 20)]) in steps and scheduler.num_pauses == 0


@pytest.mark.parametrize("seed", range(12))
def test_conservative_admission_never_pauses(seed):
    """Though slots are given ahead, and prompts take several steps."""
    rng = np.random.default_rng(seed)
    kv = KVManager(int(rng.choice([100, 128, 256])), prefix_caching=seed % 2 == 0)
    limits = Limits(100, int(rng.choice([4, 16])), int(rng.choice([8, 32, 500])))
    scheduler = Scheduler(kv, limits, conservative=True)
    for i in range(40):
        prompt = rng.integers(0, 1000, rng.integers(1, 40), dtype=np.int32)
        scheduler.add(str(i), prompt, SamplingParams(max_tokens=int(rng.integers(1, 60))))
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_pauses == 0


def test_refused_request_is_skipped_for_some_plans(count_lines):
    limits = Limits(128, 4, 16, max_num_queued_reqs=1000, max_num_queued_tokens=4000)
    scheduler = Scheduler(KVManager(256), limits)
    for i in range(1000):
        lines, _ = count_lines(scheduler.add, str(i), ids(1, 2, 3), LONG)
        assert lines < 200


@pytest.mark.parametrize("requests", [8, 200])
def test_most_steps_of_decodes_place_no_slots(requests):
    """Requests of any lengths come to be given slots in the same steps, each slot before it is needed, and of
    many requests some at a time."""
    scheduler = make(slots=1 << 14, max_num_seqs=requests, budget=8 * requests)
    for i in range(requests):
        scheduler.add(str(i), np.arange(50 * i, 50 * i + 3 + 5 * (i % 8), dtype=np.int32), LONG)
        if requests < 9:
            step(scheduler)
    while len(step(scheduler)[0].decodes) < requests:
        pass
    held, placing = {r.row: len(r.seq) for r in scheduler.running}, 0
    for _ in range(32):
        plan, _ = step(scheduler)
        assert len(plan.decodes) == requests and not plan.chunks
        assert len(plan.placed) <= lookahead.GROWN_AT_ONCE
        for row, start, slots, _ in plan.placed:
            assert start == held[row]
            held[row] += len(slots)
        placing += bool(plan.placed)
        assert all(held[r.row] == len(r.seq) >= r.num_computed for r in scheduler.running)
    assert placing <= 32 * -(-requests // lookahead.GROWN_AT_ONCE) / (lookahead.GROW_TOKENS // 2)


def test_chunks_behind_a_long_prefix_share_the_room_for_it(monkeypatch):
    """K and V before a step's chunks are bounded, however many requests have a prefix in the cache; the first
    always advances, and all get there."""
    monkeypatch.setattr("qrt.engine.schedule.limits.CACHED_TOKENS", 100)
    scheduler = make(slots=4096, max_model_len=90, max_num_seqs=16, budget=64)
    prefix = np.arange(40, dtype=np.int32)
    scheduler.add("first", prefix, SamplingParams(max_tokens=1))
    assert step(scheduler)[1][0].finish_reason
    for i in range(9):
        scheduler.add(str(i), np.concatenate((prefix, ids(100 + i, 7))), SamplingParams(max_tokens=1))
    steps = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        steps.append([(c.request_id, c.start) for c in plan.chunks])
        assert {new.row for new in plan.admitted} <= {c.row for c in plan.chunks}, "a failed step must end it"
    assert all(sum(start for _, start in chunks) <= 100 for chunks in steps)
    assert [chunk for chunks in steps for chunk in chunks] == [(str(i), 40) for i in range(9)]
    assert len(steps) == 5


def test_decodes_leave_less_budget_and_never_none():
    scheduler = make(max_num_seqs=8, budget=3)
    for name in "abcdef":
        scheduler.add(name, ids(*map(ord, name * 4)), LONG)
    for _ in range(30):
        plan, _ = step(scheduler)
        assert len(plan.decodes) + sum(len(c.tokens) for c in plan.chunks) <= 3
    assert {request.id for request in scheduler.running} == set("abc")


def test_a_cached_prefix_is_not_computed_again():
    scheduler = make()
    scheduler.add("a", np.arange(10, dtype=np.int32), SamplingParams(max_tokens=1))
    assert step(scheduler)[1][0].finish_reason
    scheduler.add("b", np.arange(12, dtype=np.int32), LONG)
    plan, deltas = step(scheduler)
    assert shape(plan) == ([], [("b", 10, 2)])
    assert [(new.row, new.start, len(new.slots)) for new in plan.placed] == [(plan.chunks[0].row, 0, 12)]
    assert deltas[0].num_cached == 10
    scheduler.add("c", np.arange(12, dtype=np.int32), SamplingParams(max_tokens=1, prompt_logprobs=0))
    plan, _ = step(scheduler)
    assert plan.chunks[0].start == 0, "a scored prompt needs the logits of every position"
    assert plan.chunks[0].scoring.targets.tolist() == list(range(1, 12))


def test_only_who_can_share_soon_waits():
    """Not for a prompt that is only scored, nor for one of another salt."""
    scheduler, prompt = make(budget=128), np.arange(40, dtype=np.int32)
    scheduler.add("scored", prompt, SamplingParams(prompt_logprobs=0), generate=False)
    scheduler.add("a", prompt, LONG)
    scheduler.add("salted", prompt, LONG, cache_salt="x")
    scheduler.add("b", prompt, LONG)
    assert shape(step(scheduler)[0]) == ([], [("scored", 0, 39), ("a", 0, 40), ("salted", 0, 40)])
    assert shape(step(scheduler)[0]) == (["a", "salted"], [("b", 39, 1)])


def test_last_request_is_paused_and_resumes(monkeypatch):
    monkeypatch.setattr(admission, "EXPECTED_TOKENS", 0)
    monkeypatch.setattr(lookahead, "GROW_TOKENS", 1)
    scheduler = make(slots=64, max_model_len=64, max_num_seqs=2, budget=64)
    scheduler.add("a", np.arange(10, dtype=np.int32), SamplingParams(max_tokens=20))
    scheduler.add("b", np.arange(100, 134, dtype=np.int32), SamplingParams(max_tokens=20))
    scheduler.add("c", ids(4), LONG)
    while not scheduler.num_pauses:
        plan, _ = step(scheduler)
    assert [r.id for r in scheduler.running] == ["a"] and shape(plan) == (["a"], [])
    assert [r.id for r in scheduler.waiting] == ["b", "c"], "the paused one waits before later ones"
    starts = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        scheduler.kv.check()
        starts += [(c.request_id, c.start, c.end) for c in plan.chunks]
    name, start, end = starts[0]
    assert name == "b" and 0 < start < end, "what was not evicted is not computed again"
    assert scheduler.kv.available == 64


def test_no_pause_while_every_request_gets_a_slot(monkeypatch):
    monkeypatch.setattr(admission, "EXPECTED_TOKENS", 0)
    scheduler = make(slots=64, max_model_len=64, max_num_seqs=2, budget=64, prefix_caching=False)
    scheduler.add("a", np.arange(20, dtype=np.int32), SamplingParams(max_tokens=20))
    scheduler.add("b", np.arange(100, 130, dtype=np.int32), SamplingParams(max_tokens=20))
    for _ in range(1 + (64 - 50) // 2):
        assert len(step(scheduler)[0].works) == 2
    assert scheduler.num_pauses == 0 and scheduler.kv.available == 0


def test_refused_requests_name_the_lengths():
    scheduler = make(slots=96, max_model_len=128)
    for length, message in (
        (0, "expected at least one token"),
        (128, "expected at most 127 tokens .*max_model_len 128.*got 128"),
        (97, "KV pool 96"),
    ):
        with pytest.raises(ConfigError, match=message):
            scheduler.add("x", np.zeros(length, np.int32), LONG)
    scheduler.add("x", ids(1), LONG)
    with pytest.raises(ConfigError, match="'x': already in use"):
        scheduler.add("x", ids(1), LONG)
    scheduler.add("whole", np.zeros(97, np.int32), LONG, generate=False)  # the last token takes no slot
    with pytest.raises(ConfigError, match="expected at most 97 tokens .*, got 98"):
        scheduler.add("more", np.zeros(98, np.int32), LONG, generate=False)
    assert not scheduler.running and len(scheduler.waiting) == 2


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 108), (5, 5), (500, 108)])
def test_max_tokens_defaults_to_the_rest_of_the_context(max_tokens, expected):
    scheduler = make()
    scheduler.add("a", np.zeros(20, np.int32), SamplingParams(max_tokens=max_tokens))
    count = 0
    while scheduler.has_work:
        count += sum(len(delta.token_ids) for delta in step(scheduler)[1])
    assert count == expected


def test_abort_at_any_time_gives_everything_back():
    scheduler = make(budget=8)
    for name in "abc":
        scheduler.add(name, np.full(12, ord(name), np.int32), LONG)
    step(scheduler)
    for name in ("c", "a", "nobody", "a"):  # waiting, half prefilled, unknown, gone
        scheduler.abort(name)
    plan, _ = step(scheduler)
    assert [work.request_id for work in plan.works] == ["b"]
    scheduler.abort("b")
    assert scheduler.kv.cached(np.full(12, ord("b"), np.int32)) == 8, "what it computed stays"
    assert not scheduler.has_work and scheduler.plan() is None
    assert scheduler.kv.available == 256
    scheduler.kv.check()


def test_unseeded_requests_follow_the_engine_seed():
    def seeds(engine_seed):
        scheduler = Scheduler(KVManager(64), Limits(32, 4, 16), seed=engine_seed)
        for i in range(3):
            scheduler.add(str(i), ids(1), LONG)
        return [request.sampling.seed for request in scheduler.waiting]

    assert seeds(1) == seeds(1) != seeds(2) and len(set(seeds(1))) == 3
    assert seeds(-1)  # a negative engine seed is a seed


@pytest.mark.parametrize("limits", [(512, 256, 8192), (4096, 4, 8192), (64, 8, 8192), (128, 300, 100)])
def test_the_largest_step_is_within_the_limits(limits):
    limits = Limits(*limits)
    plan = largest_plan(limits)
    sizes = [len(chunk.tokens) for chunk in plan.chunks]
    assert sum(sizes) == min(limits.max_num_batched_tokens, len(sizes) * limits.max_model_len)
    assert max(sizes) <= limits.max_model_len and min(sizes) > 0
    assert len(sizes) == min(limits.max_num_seqs, limits.max_num_batched_tokens) == len(plan.sampled)
    slots = np.concatenate([new.slots for new in plan.placed])
    assert sorted(slots) == list(range(sum(sizes)))
    assert len({chunk.row for chunk in plan.chunks}) == len(sizes)


@pytest.mark.parametrize("prompt,computed", [
    (1100, 1024), (1151, 1024), (1152, 1152), (1200, 1200), (1300, 1280), (1350, 1350), (1500, 1400),
    (500, 500),
])  # fmt: skip
def test_mixed_step_is_cut_to_a_nearby_graph_size(prompt, computed):
    """`computed` tokens with the decode, of so many: those beyond a size wait if the next size is further."""
    limits = Limits(4096, 4, 1400, step_sizes=(256, 512, 1024, 1280, 1400))
    scheduler = Scheduler(KVManager(4096), limits)
    scheduler.add("a", ids(1, 2, 3), LONG)
    step(scheduler)
    scheduler.add("b", np.arange(prompt - 1, dtype=np.int32), LONG)
    plan, _ = step(scheduler)
    assert 1 + len(plan.chunks[0].tokens) == computed
    while plan.chunks and not plan.chunks[-1].samples:
        plan, _ = step(scheduler)
    assert plan.chunks[-1].end == prompt - 1, "the rest follows"


def test_prompts_alone_are_not_shortened():
    scheduler = Scheduler(KVManager(4096), Limits(4096, 4, 1400, step_sizes=(512, 1024, 1280)))
    scheduler.add("a", np.arange(1030, dtype=np.int32), LONG)
    assert len(scheduler.plan().chunks[0].tokens) == 1030


def test_waiting_requests_get_several_rows_at_once():
    """4 of 256; but at once where fewer wait, where none runs and beside a prompt that goes on."""
    scheduler = Scheduler(KVManager(1 << 14), Limits(64, 256, 2000))
    for i in range(256 + 7):
        scheduler.add(str(i), ids(1 + i), SamplingParams(max_tokens=2 + min(i, 9), ignore_eos=True))
    plan, _ = step(scheduler)
    assert len(plan.chunks) == 256, "none runs"
    sizes = []
    while scheduler.waiting:
        plan, _ = step(scheduler)
        sizes.append((len(plan.decodes), len(plan.chunks)))
    assert (
        sizes
        == [(256, 0), (255, 0), (254, 0), (253, 0), (252, 4), (255, 0), (254, 0), (253, 3)][: len(sizes)]
    )
    assert all(chunks in (0, 3, 4) for _, chunks in sizes)


def test_higher_priority_does_not_wait_for_more_rows():
    scheduler = Scheduler(KVManager(1 << 14), Limits(64, 256, 2000))
    for i in range(256 + 7):
        scheduler.add(str(i), ids(1 + i), SamplingParams(max_tokens=2 + min(i, 9), ignore_eos=True))
    step(scheduler)
    scheduler.add("urgent", ids(5), LONG, priority=-1)
    while not (plan := step(scheduler)[0]).chunks:
        assert len(plan.decodes) == 256, "no row is free"
    assert plan.chunks[0].request_id == "urgent" and len(plan.decodes) == 255


def test_a_free_row_does_not_wait_for_ever():
    """Requests with long outputs end rarely: those that wait get the first row after some plans."""
    scheduler = Scheduler(KVManager(1 << 18), Limits(512, 256, 2000))
    for i in range(256 + 7):
        output = 2 if i == 0 else 400
        scheduler.add(str(i), ids(1 + i), SamplingParams(max_tokens=output, ignore_eos=True))
    sizes = []
    while not sizes or sizes[-1][1] == 0 or len(sizes) == 1:
        plan, _ = step(scheduler)
        sizes.append((len(plan.decodes), len(plan.chunks)))
    assert sizes == [(0, 256), (256, 0), *[(255, 0)] * PATIENCE, (255, 1)]
