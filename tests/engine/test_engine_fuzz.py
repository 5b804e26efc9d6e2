"""The whole loop under random load, on a model that notices a wrong slot, position or row.

Whatever arrives when, is aborted, paused, cut into chunks or served from the prefix cache: every request ends
exactly once with exactly the tokens that it gets alone, and all slots come back.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_decoder import (
    EOS,
    VOCAB,
    FakeDecoder,
    WindowedDecoder,
    fake_engine,
    greedy,
    next_logits,
    run,
    tokens,
)

from cases import one_in
from qrt.engine.schedule import admission, lookahead, sharing
from qrt.engine.schedule.request import FinishReason
from qrt.errors import ConfigError, QueueFullError
from qrt.mem import sizing, windows
from qrt.request.sampling import SamplingParams

_alone = fake_engine(max_num_seqs=1, enable_prefix_caching=False, overlap=False)


def alone(prompt, params):
    """Tokens, reason and stop reason of a request that has the engine for itself."""
    _alone.add("alone", prompt, replace(params, logprobs=None))
    deltas = run(_alone)["alone"]
    check_filters(prompt, params, tokens(deltas))
    return tokens(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason


def check_filters(prompt, params, drawn):
    """Every token is the likeliest at temperature 0, else of the top_k likeliest and, of those, of the fewest
    whose probability reaches top_p; where the logits are adjusted, it is an allowed one."""
    allowed = set(range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids)
    assert allowed.issuperset(drawn)
    adjusted = replace(params, **{name: getattr(PLAIN, name) for name in ADJUSTMENTS}) != params
    if adjusted or params.min_tokens:
        return
    most = (params.top_k or VOCAB) if params.temperature else 1
    for token, logits in zip(drawn, next_logits(prompt + drawn)[len(prompt) - 1 :], strict=False):
        ranked = logits.sort(descending=True).indices[:most]
        probability = (logits[ranked] / (params.temperature or 1)).softmax(-1)
        before = probability.cumsum(-1) - probability
        assert token in ranked[before < params.top_p + 1e-5]


def random_params(rng):
    tokens_max = rng.choice([1, 2, 5, 12, 30, None])
    return SamplingParams(
        temperature=rng.choice([0, 0, 0.7, 1.5]),
        top_k=rng.choice([0, 0, 3, 20]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        seed=rng.randrange(1000),
        max_tokens=tokens_max,
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 0, 2])),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 0, 2]),
        **(random_adjustments(rng) if rng.random() < 0.4 else {}),
    )


def random_adjustments(rng):
    ways = {
        "min_p": 0.2,
        "repetition_penalty": 1.7,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "exponential_decay_length_penalty": (2, 1.4),
        "logit_bias": {rng.randrange(VOCAB): 5.0, rng.randrange(VOCAB): -100.0},
        "allowed_token_ids": rng.sample(range(VOCAB), 9),
        "bad_words": [(rng.randrange(VOCAB),)] + [(a, b) for a in range(0, VOCAB, 2) for b in (1, 8)],
    }
    return dict(rng.sample(list(ways.items()), 2))


PLAIN = SamplingParams()
ADJUSTMENTS = (
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "exponential_decay_length_penalty", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip


def random_prompt(rng, shared):
    prefix = rng.choice(shared)[: rng.choice([0, 4, 15, 16, 30])]
    return prefix + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]


def check_logprobs(prompt, params, deltas):
    """The reported log-probabilities are those of the definition, each token once."""
    sequence = prompt + tokens(deltas)
    truth = next_logits(sequence).log_softmax(-1)
    if params.logprobs is not None:
        scores = np.concatenate([delta.logprobs.logprobs for delta in deltas if delta.token_ids])
        places = range(len(prompt) - 1, len(sequence) - 1)
        expected = [truth[place, sequence[place + 1]] for place in places]
        torch.testing.assert_close(torch.from_numpy(scores), torch.stack(expected))
    if params.prompt_logprobs is not None:
        scores = [delta.prompt_scores for delta in deltas if delta.prompt_scores]
        expected = truth[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.long)]
        got = np.concatenate([np.empty(0, np.float32)] + [s.logprobs for s in scores])
        torch.testing.assert_close(torch.from_numpy(got), expected)
        top = truth[: len(prompt) - 1].topk(params.prompt_logprobs).values
        none = np.empty((0, params.prompt_logprobs), np.float32)
        got = np.concatenate([none] + [s.top_logprobs for s in scores])
        torch.testing.assert_close(torch.from_numpy(got), top)


def random_engine(rng, monkeypatch, model=None):
    """Every way of the engine, and an estimate that is often too low."""
    slack = rng.choice([0, 0, 3, 64])
    monkeypatch.setattr(
        admission, "expected_output", lambda done, most, conservative: np.minimum(most, done + slack)
    )
    monkeypatch.setattr(lookahead, "GROW_TOKENS", rng.choice([1, 5]))
    monkeypatch.setattr(lookahead, "GROWN_AT_ONCE", rng.choice([1, 3, 64]))
    monkeypatch.setattr(sharing, "SHARED_TOKENS", rng.choice([1, 8, 1000]))
    pools = [112, 128, 160, 512] if model else [48, 64, 80, 256]  # of both groups together
    return fake_engine(
        model or FakeDecoder(rng.choice([0, 0, 20])),
        pool=rng.choice(pools),
        max_model_len=48,
        max_num_seqs=rng.choice([2, 6, 6, 12]),
        max_num_batched_tokens=rng.choice([2, 7, 16, 16, 64, 512]),
        enable_prefix_caching=rng.random() < 0.7,
        overlap=rng.random() < 0.7,
        scheduling_policy=rng.choice(["fcfs", "fcfs", "priority"]),
    )


def check_order(engine, added):
    """Each queue in order of priority, then arrival; first come, first served: no later one runs before.

    Except a request that begins anew with other RoPE tables.
    """
    arrival = {name: place for place, name in enumerate(added)}
    by_priority = engine.config.scheduling_policy == "priority"

    def key(request):
        return (added[request.id][2], arrival[request.id])

    running = [key(request) for request in engine.scheduler.running]
    waiting = [key(request) for request in engine.scheduler.waiting]
    assert running == sorted(running) and waiting == sorted(waiting)
    crosses = engine.model.arch.long_rope_switch
    assert by_priority or crosses or running + waiting == sorted(running + waiting)


def windowed(rng, monkeypatch):
    """A model with a window of a few tokens, for requests that keep hardly more."""
    monkeypatch.setattr(windows, "MARGIN", rng.choice([0, 3]))
    monkeypatch.setattr(windows, "AHEAD", 15)
    monkeypatch.setattr(windows, "STEP_TOKENS", rng.choice([1, 8]))
    if rng.random() < 0.5:  # windows run out of slots before the other group does
        monkeypatch.setattr(sizing, "_divided", lambda budget, sizes, least, most: [most[0], least[1]])
    return WindowedDecoder(rng.choice([1, 2, 6, 9]), rng.choice([0, 0, 20]))


@torch.inference_mode()
def poison(engine):
    """Overwrite every slot of a window group that nobody holds."""
    for pool in engine.scheduler.kv.windows:
        if len(engine.model.seen):
            engine.model.seen[np.setdiff1d(np.arange(pool.capacity), pool._slots.in_use())] = -7


@pytest.mark.parametrize(("seed", "window"), one_in(6, range(24), [False, True]))
def test_any_schedule_gives_the_tokens_of_a_lone_request(seed, window, monkeypatch):
    rng = random.Random(seed)
    engine = random_engine(rng, monkeypatch, windowed(rng, monkeypatch) if window else None)
    assert len(engine.scheduler.kv.windows) == window
    shared = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    most = 3 if engine.config.scheduling_policy == "priority" else 1
    pending = {
        str(i): (random_prompt(rng, shared), random_params(rng), rng.randrange(most), rng.choice([None, "x"]))
        for i in range(14)
    }
    added, deltas, ended, aborted = {}, {}, set(), set()
    for _ in range(5000):
        while pending and rng.random() < 0.6:
            name, (prompt, params, priority, salt) = pending.popitem()
            generate = rng.random() < 0.85  # or only score the prompt
            engine.add(name, prompt, params, generate=generate, priority=priority, cache_salt=salt)
            added[name] = (prompt, params, priority, generate)
        if added and rng.random() < 0.01:
            name = rng.choice(list(added))
            engine.abort(name)
            aborted |= {name} - ended
        poison(engine)
        for delta in engine.step():
            name = delta.request_id
            assert name in added and name not in ended and name not in aborted, "answered twice or unasked"
            deltas.setdefault(name, []).append(delta)
            if delta.finish_reason:
                ended.add(name)
        engine.scheduler.kv.check()
        check_order(engine, added)
        if not pending and not engine.has_work:
            break
    assert ended | aborted == set(added) and not engine.has_work
    for name in ended:
        prompt, params, _, generate = added[name]
        limit = engine.max_model_len - len(prompt)
        wanted = replace(params, max_tokens=min(params.max_tokens or limit, limit))
        last = deltas[name][-1]
        expected = alone(prompt, wanted) if generate else ([], FinishReason.LENGTH, None)
        assert (tokens(deltas[name]), last.finish_reason, last.stop_reason) == expected
        check_logprobs(prompt, params if generate else replace(params, logprobs=None), deltas[name])
    kv = engine.scheduler.kv
    assert all(pool.available == pool.capacity for pool in kv.windows)
    assert kv.available == kv.num_slots and not engine.scheduler.running and not engine.scheduler.waiting
    assert len(engine.scheduler._rows) == min(
        engine.scheduler.limits.max_num_seqs, engine.config.max_num_batched_tokens
    )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_a_full_pool_pauses_the_last_and_loses_nothing(caching, overlap, monkeypatch):
    monkeypatch.setattr(admission, "expected_output", lambda done, most, conservative: done)
    engine = fake_engine(pool=64, max_num_seqs=6, enable_prefix_caching=caching, overlap=overlap)
    prompts = [[i, 2, 3, 4, 5, 6, 8, 9] for i in range(6)]
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    order, deltas = [], {}
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
            order += [delta.request_id] if delta.finish_reason else []
    assert engine.scheduler.num_pauses > 0
    assert order[0] == "0", "the first to come is never paused"
    for i, prompt in enumerate(prompts):
        assert tokens(deltas[str(i)]) == greedy(prompt, 40)


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("admission_mode", ["conservative", "aggressive"])
def test_conservative_admission_never_pauses(admission_mode, window, monkeypatch):
    """Neither group runs out of slots; with a window, its group would first."""
    monkeypatch.setattr(admission, "EXPECTED_TOKENS", 1)
    pool, model, settings = 96, None, {}
    if window:
        monkeypatch.setattr(windows, "MARGIN", 0)
        monkeypatch.setattr(windows, "AHEAD", 12)
        monkeypatch.setattr(lookahead, "GROW_TOKENS", 4)
        monkeypatch.setattr(sizing, "_divided", lambda *_: [768, 48])
        pool, model, settings = 512, WindowedDecoder(window), {"max_model_len": 128}
    engine = fake_engine(model, pool=pool, max_num_seqs=6, admission=admission_mode, **settings)
    for i in range(6):
        params = SamplingParams(temperature=0, max_tokens=40, logit_bias={EOS: -100.0})
        engine.add(str(i), [i, 2, 3, 4], params)
    run(engine)
    assert (engine.scheduler.num_pauses == 0) is (admission_mode == "conservative")


@pytest.mark.parametrize("max_model_len", [40, 250])
@pytest.mark.parametrize("batched", [64, 8192])
def test_all_requests_run_at_once_where_memory_is_enough(batched, max_model_len, monkeypatch):
    """With as many slots of windows as can be used, requests of full length all decode at once."""
    monkeypatch.setattr(windows, "MARGIN", 0)
    monkeypatch.setattr(windows, "AHEAD", 12)
    monkeypatch.setattr(lookahead, "GROW_TOKENS", 4)
    limits = {"max_model_len": max_model_len, "max_num_seqs": 16, "max_num_batched_tokens": batched}
    engine = fake_engine(WindowedDecoder(8), pool=1 << 14, admission="conservative", **limits)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logit_bias={EOS: -100.0})
    for i in range(16):
        engine.add(str(i), [i] * (max_model_len * 6 // 10), params)
    decoding = 0
    while engine.has_work:
        engine.step()
        decoding = max(decoding, sum(request.decoding for request in engine.scheduler.running))
    assert decoding == 16 and engine.scheduler.num_pauses == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_long_prompt_leaves_slots_of_windows_to_decodes(overlap, monkeypatch):
    """Its chunks are as long as the room beside what running requests soon need."""
    monkeypatch.setattr(windows, "MARGIN", 0)
    monkeypatch.setattr(windows, "AHEAD", 12)
    monkeypatch.setattr(lookahead, "GROW_TOKENS", 4)
    monkeypatch.setattr(sizing, "_divided", lambda *_: [768, 120])
    settings = {"max_model_len": 250, "admission": "conservative", "overlap": overlap}
    engine = fake_engine(WindowedDecoder(40), pool=1024, max_num_seqs=6, **settings)
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias={EOS: -100.0})
    engine.add("decodes", [1, 2, 3, 4], params)
    for _ in range(6):  # the next slots are due during the prompt
        engine.step()
    engine.add("long", [5] * 190, params)
    deltas = run(engine)
    assert engine.scheduler.num_pauses == 0 and len(tokens(deltas["long"])) == 60


def test_a_priority_request_runs_first_and_makes_room(monkeypatch):
    monkeypatch.setattr(admission, "expected_output", lambda done, most, conservative: done)
    engine = fake_engine(pool=48, max_num_seqs=2, scheduling_policy="priority")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.add("later", [1, 2, 3], params, priority=5)
    engine.add("waits", [2, 2, 3], params, priority=5)
    for _ in range(4):
        engine.step()
    engine.add("first", [3, 2, 3], params, priority=-1)
    order = []
    while engine.has_work:
        order += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert order.index("first") < order.index("waits") and engine.scheduler.num_pauses > 0


def test_full_queue_refuses_only_new_requests():
    engine = fake_engine(max_num_seqs=1, max_num_queued_reqs=2, overlap=True)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add("0", [1], params)
    engine.step()
    for name in "12":
        engine.add(name, [1], params)
    with pytest.raises(QueueFullError, match="2 requests waiting"):
        engine.add("3", [1], params)
    assert {name: len(tokens(own)) for name, own in run(engine).items()} == {"0": 3, "1": 3, "2": 3}


def test_equal_prompts_at_once_are_computed_once():
    """The first computes what the others share; `num_cached` says so, and a salt keeps them apart."""
    model = FakeDecoder()
    engine = fake_engine(model, max_num_seqs=8, pool=256)
    prompt = [(7 * i) % VOCAB for i in range(60)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for i in range(4):
        engine.add(str(i), prompt, params)
    engine.add("salted", prompt, params, cache_salt="me")
    engine.add("salted too", prompt, params, cache_salt="me")
    deltas = run(engine)
    cached = {name: own[0].num_cached for name, own in deltas.items()}
    assert cached == {"0": 0, "1": 59, "2": 59, "3": 59, "salted": 0, "salted too": 59}
    assert all(tokens(own) == greedy(prompt, 5) for own in deltas.values())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("same", [0, 1, 20])
def test_shared_prompt_starts_are_computed_once(same, overlap):
    """As with a token that begins every text: groups of equal prompts come at once."""
    engine = fake_engine(max_num_seqs=12, pool=512, overlap=overlap)
    prompts = [[1] * same + [2 + i] + [(7 * j) % VOCAB for j in range(60)] for i in range(3)]
    for i, prompt in enumerate(prompts * 4):
        engine.add(str(i), prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    deltas = run(engine)
    cached = [deltas[str(i)][0].num_cached for i in range(12)]
    assert cached == 3 * [0] + 9 * [same + 60]
    assert all(tokens(own) == greedy(prompts[int(name) % 3], 9) for name, own in deltas.items())


def test_slots_of_a_group_are_those_of_one_prompt():
    engine = fake_engine(max_num_seqs=8, pool=128)
    prompt = [(7 * i) % VOCAB for i in range(60)]
    for i in range(8):
        engine.add(str(i), prompt, SamplingParams(seed=i, max_tokens=4, ignore_eos=True))
    run(engine)
    assert engine.scheduler.num_pauses == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_failing_step_ends_only_its_requests(overlap):
    model = FakeDecoder()
    engine = fake_engine(model, pool=128, max_num_seqs=2, overlap=overlap)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for i in range(4):
        engine.add(str(i), [i, 1, 2], params)
    model.fail_at = {4}
    deltas = run(engine)
    for name in ("0", "1"):
        assert deltas[name][-1].finish_reason is FinishReason.ABORT
        assert deltas[name][-1].error == "RuntimeError: injected fault"
        assert tokens(deltas[name]) == greedy([int(name), 1, 2], 3)
    for name in ("2", "3"):
        assert tokens(deltas[name]) == greedy([int(name), 1, 2], 10)
    engine.scheduler.kv.check()
    assert engine.scheduler.kv.available == engine.scheduler.kv.num_slots


def test_eos_ends_and_ignore_eos_does_not():
    prompt = next(p for p in ([a, b] for a in range(VOCAB) for b in range(VOCAB)) if EOS in greedy(p, 20)[2:])
    wanted = greedy(prompt, 20)
    engine = fake_engine()
    engine.add("stop", prompt, SamplingParams(temperature=0, max_tokens=20))
    engine.add("go on", prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    engine.add("id", prompt, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(wanted[1],)))
    late = wanted.index(EOS) + 1
    engine.add("late", prompt, SamplingParams(temperature=0, max_tokens=20, min_tokens=late))
    named = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(EOS,))
    engine.add("named", prompt, named)
    engine.add("named alone", prompt, replace(named, ignore_eos=True))
    deltas = run(engine)
    assert tokens(deltas["stop"]) == wanted[: wanted.index(EOS) + 1]
    assert deltas["stop"][-1].finish_reason is FinishReason.STOP and deltas["stop"][-1].stop_reason is None
    assert tokens(deltas["named"]) == tokens(deltas["named alone"]) == tokens(deltas["stop"])
    assert deltas["named"][-1].stop_reason is None and deltas["named alone"][-1].stop_reason == EOS
    assert tokens(deltas["go on"]) == wanted
    assert deltas["go on"][-1].finish_reason is FinishReason.LENGTH
    assert tokens(deltas["id"]) == wanted[: wanted.index(wanted[1]) + 1]
    assert deltas["id"][-1].stop_reason == wanted[1]
    assert EOS not in tokens(deltas["late"])[:late] and len(tokens(deltas["late"])) > late


def test_request_id_can_be_reused_during_its_last_step():
    engine = fake_engine(overlap=True)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add("a", [1, 2, 3], params)
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.add("a", [9, 8], params)
    assert tokens(run(engine)["a"]) == greedy([9, 8], 6)
    engine.scheduler.kv.check()


def test_known_end_launches_no_surplus_step():
    model = FakeDecoder()
    engine = fake_engine(model, overlap=True)
    engine.add("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert engine.step() == [] and model.steps == 1
    assert len(engine.step()) == 1 and model.steps == 2
    run(engine)
    assert model.steps == 4, "max_tokens is known when a step is planned"


def test_a_growing_end_of_text_ends_it():
    engine = fake_engine()
    prompt = next([a, b] for a in range(VOCAB) for b in range(VOCAB) if EOS not in greedy([a, b], 60))
    engine.add("a", prompt, SamplingParams(temperature=0, max_tokens=60))
    params = SamplingParams(temperature=0, max_tokens=60, exponential_decay_length_penalty=(8, 1.5))
    engine.add("b", prompt, params)
    deltas = run(engine)
    assert len(tokens(deltas["a"])) == 60 and deltas["b"][-1].finish_reason is FinishReason.STOP
    ended = tokens(deltas["b"])
    assert 8 < len(ended) < 40 and ended[:8] == greedy(prompt, 8)


@pytest.mark.parametrize("overlap", [True, False])
def test_bad_words_never_come(overlap):
    engine = fake_engine(overlap=overlap)
    wanted = greedy([1, 2], 30)
    words = [tuple(wanted[4:6]), tuple(wanted[10:13]), (wanted[20],)]
    engine.add("a", [1, 2], SamplingParams(temperature=0, max_tokens=30, bad_words=words, ignore_eos=True))
    got = tokens(run(engine)["a"])
    assert got[:5] == wanted[:5] and got[5] != wanted[5]
    for word in words:
        assert not [i for i in range(30) if tuple(got[i : i + len(word)]) == word]


def test_min_tokens_with_only_stop_tokens_is_refused():
    engine, every = fake_engine(), [token for token in range(VOCAB) if token != EOS]
    with pytest.raises(ConfigError, match="may leave no token"):
        engine.add("a", [1, 2], SamplingParams(stop_token_ids=every, min_tokens=1))
    engine.add("b", [1, 2], SamplingParams(stop_token_ids=every))
    engine.add("c", [1, 2], SamplingParams(stop_token_ids=every, min_tokens=1, max_tokens=3, ignore_eos=True))
    assert {name: len(tokens(own)) for name, own in run(engine).items()} == {"b": 1, "c": 2}


def test_queue_is_bounded_in_tokens_too():
    """Whatever it takes of the pool to come: prompts, and outputs of the paused. One alone always may."""
    engine = fake_engine(max_num_seqs=1, max_num_queued_tokens=10, overlap=True)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add("0", [1] * 20, params)
    engine.step()
    engine.add("1", [1] * 7, params)
    with pytest.raises(QueueFullError, match="7 tokens waiting, at most 10"):
        engine.add("2", [1] * 4, params)
    engine.add("3", [1] * 3, params)
    assert {name: len(tokens(own)) for name, own in run(engine).items()} == {"0": 3, "1": 3, "3": 3}
    engine.add("4", [1] * 11, params)
    assert len(tokens(run(engine)["4"])) == 3
