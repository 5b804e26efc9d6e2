"""Requests with grammars and thinking among others, under random load, against the definition."""

import gc
import random
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from fake_decoder import EOS, VOCAB, FakeDecoder, WindowedDecoder, fake_engine, next_logits, run, tokens
from fake_grammars import FakeBatch, FakeGrammars, FakeMatcher, rule

from cases import one_in
from qrt.engine.constrain import constraints
from qrt.engine.schedule import admission, lookahead
from qrt.engine.schedule.output import Cause
from qrt.engine.schedule.request import FinishReason
from qrt.errors import ConfigError
from qrt.mem import windows
from qrt.request.sampling import SamplingParams
from qrt.request.thinking import Thinking

GREEDY = SamplingParams(temperature=0, max_tokens=30)
MARKS = Thinking(end=(3, 4), start=(5,), budget=6, closing=(9, 3, 4))


def engine_of(model=None, **settings):
    engine = fake_engine(model, **settings)
    engine._constraints._load, engine._constraints._batch = FakeGrammars, FakeBatch()
    return engine


def shape(key, length):
    return {"regex": f"{key}:{length}"}


def expected(prompt, params, thinking=None):
    """Output and whether its grammar ended it, token by token from the definition, greedily."""
    text = params.structured_outputs.regex if params.structured_outputs else None
    output, thought, answer, closing = [], [], [], []
    phase = "answer"
    if thinking and (thinking.inside or thinking.start):
        phase = "think" if thinking.inside else "start"
    while len(output) < params.max_tokens:
        logits = next_logits(prompt + output)[-1]
        allowed, may_end = rule(text, answer) if text else (set(range(VOCAB)), True)
        if phase == "think" and thinking.budget is not None and len(thought) >= thinking.budget:
            phase, closing = "closing", list(thinking.closing)
        if phase == "closing":
            allowed = {closing.pop(0)}
        elif phase == "think":
            allowed = set(range(VOCAB)) - ({EOS} if text else set())
        else:
            allowed |= ({EOS} if may_end else set()) | (set(thinking.start) if phase == "start" else set())
        output.append(max(allowed, key=lambda token: (logits[token], -token)))
        token = output[-1]
        if token == EOS and not text:
            return output, False
        if phase == "start":
            phase = "think" if token in thinking.start else "answer"
        elif phase == "think":
            thought.append(token)
            phase = "answer" if tuple(thought[-2:]) == thinking.end else "think"
            continue
        elif phase == "closing":
            phase = "closing" if closing else "answer"
            continue
        if phase == "answer":
            if token == EOS:
                return output, False
            answer.append(token)
            if text and not rule(text, answer)[0]:
                return output, True
    return output, False


@pytest.fixture(params=[True, False], ids=["overlap", "plain"])
def overlap(request):
    return request.param


@pytest.mark.parametrize("thinking", [None, MARKS, replace(MARKS, inside=True), replace(MARKS, budget=None)])
@pytest.mark.parametrize("key", range(3))
def test_answers_are_those_of_the_definition(key, thinking, overlap):
    engine, prompt = engine_of(overlap=overlap), [key, 1, 2]
    for name, outputs in ("shaped", shape(key, 9)), ("free", None):
        engine.add(name, prompt, replace(GREEDY, structured_outputs=outputs), thinking=thinking)
    for name, deltas in run(engine).items():
        outputs = shape(key, 9) if name == "shaped" else None
        output, whole = expected(prompt, replace(GREEDY, structured_outputs=outputs), thinking)
        assert tokens(deltas) == output and deltas[-1].is_whole == whole
        stopped = whole or output[-1] == EOS
        assert deltas[-1].finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)


@pytest.mark.parametrize("seed", one_in(2, range(10)))
def test_any_schedule_gives_the_answers_of_the_definition(seed, monkeypatch):
    """Paused, aborted, cut into chunks, with late masks, beside free requests; all slots come back."""
    rng = random.Random(seed)
    slack = rng.choice([0, 3, 64])
    monkeypatch.setattr(admission, "expected_output", lambda done, most, conservative: done + slack)
    monkeypatch.setattr(lookahead, "GROW_TOKENS", rng.choice([1, 5]))
    monkeypatch.setattr(constraints, "MOST_ROWS_FORCED", rng.choice([1, 4, 16]))
    monkeypatch.setattr(constraints, "APPENDED_CONTEXT", rng.choice([20, 4096]))
    window = rng.random() < 0.3
    monkeypatch.setattr(windows, "MARGIN", 0)
    monkeypatch.setattr(windows, "AHEAD", 15)
    monkeypatch.setattr(windows, "STEP_TOKENS", 8)
    engine = engine_of(
        WindowedDecoder(6) if window else FakeDecoder(rng.choice([0, 0, 20])),
        pool=512 if window else rng.choice([64, 96, 256]),
        max_model_len=56,
        max_num_seqs=rng.choice([2, 6, 12]),
        max_num_batched_tokens=rng.choice([2, 7, 16, 64]),
        enable_prefix_caching=rng.random() < 0.7,
        overlap=rng.random() < 0.7,
    )
    some_are_late(engine._constraints, rng, monkeypatch)
    pending, added, ended, deltas = [str(i) for i in range(16)], {}, set(), {}
    while pending or engine.has_work:
        monkeypatch.setattr(constraints, "SLOW_S", rng.choice([-1.0, 10.0]))  # next each alone, or together
        if pending and rng.random() < 0.5:
            name, prompt = pending.pop(), [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 18))]
            outputs = shape(rng.randrange(10), rng.randrange(1, 25)) if rng.random() < 0.7 else None
            thinking = rng.choice([None, MARKS, replace(MARKS, inside=True, budget=rng.randrange(9))])
            params = replace(GREEDY, structured_outputs=outputs, logprobs=rng.choice([None, None, 0]))
            engine.add(name, prompt, params, thinking=thinking)
            added[name] = prompt, params, thinking
        if added and rng.random() < 0.01:
            name = rng.choice(list(added))
            engine.abort(name)
            ended.add(name)
            deltas.pop(name, None)
        for delta in engine.step():
            assert delta.request_id not in ended and delta.error is None
            deltas.setdefault(delta.request_id, []).append(delta)
            ended |= {delta.request_id} if delta.finish_reason else set()
        engine.scheduler.kv.check()
    assert ended == set(added) and not engine._constraints._masks
    for name, own in deltas.items():
        prompt, params, thinking = added[name]
        limit = min(params.max_tokens, engine.max_model_len - len(prompt))
        assert tokens(own) == expected(prompt, replace(params, max_tokens=limit), thinking)[0]
        if params.logprobs is not None:
            assert sum(len(delta.logprobs) for delta in own) == len(tokens(own))
    assert engine.scheduler.kv.available == engine.scheduler.kv.num_slots


def some_are_late(held, rng, monkeypatch):
    """Let masks be ready at random, as if their threads were slow."""
    waiting = {}

    def start(fill):
        made = Future()
        waiting[made] = fill
        return made

    def wait(masks):
        for mask in [*waiting]:
            if rng.random() < 0.7:
                mask.set_result(waiting.pop(mask)())

    monkeypatch.setattr(held._fillers, "start", start)
    monkeypatch.setattr(held._fillers, "wait", wait)


def test_threads_end_with_their_engine(monkeypatch):
    monkeypatch.setattr(constraints, "SLOW_S", -1.0)  # each mask alone
    before = set(threading.enumerate())
    engine = engine_of()
    engine.add("a", [1], replace(GREEDY, structured_outputs=shape(1, 9)))
    run(engine)
    mine = set(threading.enumerate()) - before
    assert {thread.name.rpartition("_")[0] for thread in mine} == {"qrt-masks", "qrt-grammars"}
    del engine
    gc.collect()
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("late", [False, True])
def test_errors_in_a_thread_end_the_request(late, monkeypatch):
    monkeypatch.setattr(constraints, "SLOW_S", -1.0)
    engine = engine_of()
    if late:
        some_are_late(engine._constraints, random.Random(0), monkeypatch)
        monkeypatch.setattr(engine._constraints._fillers, "wait", lambda masks: None)
        monkeypatch.setattr(constraints, "MASK_S", 0.0)
    else:
        monkeypatch.setattr(FakeMatcher, "fill", broken)
    engine.add("shaped", [1], replace(GREEDY, structured_outputs=shape(1, 9), min_tokens=2))
    engine.add("free", [1], GREEDY)
    deltas = run(engine)
    reason = "its grammar took longer than 0 s for one token" if late else "broken"
    assert deltas["shaped"][-1].cause is Cause.REQUEST and reason in deltas["shaped"][-1].error
    assert not engine.failed_steps
    assert tokens(deltas["free"]) == expected([1], GREEDY)[0]


def broken(matcher, row):
    raise ValueError("broken")


@pytest.mark.parametrize("seed", range(2))
def test_draws_do_not_depend_on_others_or_on_appending(seed, overlap, monkeypatch):
    """At temperature 1, with top-k and penalties: alone, and beside others with tokens appended."""
    params = SamplingParams(seed=seed, max_tokens=20, structured_outputs=shape(seed, 30))
    kinds = {
        "plain": params, "filtered": replace(params, top_k=4),
        "free": replace(params, structured_outputs=None),
        "penalties": replace(params, repetition_penalty=1.5, frequency_penalty=0.7),
    }  # fmt: skip
    engine = engine_of(overlap=overlap)
    for name, own in kinds.items():
        engine.add(name, [seed, 2], own)
    together = {name: tokens(deltas) for name, deltas in run(engine).items()}
    monkeypatch.setattr(constraints, "MOST_ROWS_FORCED", 0)
    for name, own in kinds.items():
        lone = engine_of(overlap=False)
        lone.add("lone", [seed, 2], own)
        assert tokens(run(lone)["lone"]) == together[name]


def test_tokens_are_followed_before_the_next_draw(monkeypatch):
    """The device computes the next hidden states meanwhile; free requests keep their one launch a step."""
    engine, calls = engine_of(overlap=True), []
    for owner, name in (
        (engine.runner, "forward"), (engine.runner, "sample"), (engine.runner, "launch"),
        (engine._constraints, "take"), (engine._constraints, "fill"),
    ):  # fmt: skip
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, call=call, name=name: (calls.append(name), call(*args))[1]
        )
    engine.add("shaped", [1, 2], replace(GREEDY, max_tokens=4, structured_outputs=shape(3, 30)))
    run(engine)
    steps = [name for name in calls if name != "launch"]
    assert steps[:3] == ["forward", "fill", "sample"] and steps[3:7] == ["forward", "take", "fill", "sample"]
    calls.clear()
    engine.add("free", [1, 2], replace(GREEDY, max_tokens=4))
    run(engine)
    assert set(calls) == {"launch", "take"}


def test_rules_that_exclude_the_shape_end_the_request():
    engine = engine_of()
    allowed = sorted(set(range(VOCAB)) - rule("1:9", [])[0])
    engine.add("none left", [1], replace(GREEDY, structured_outputs=shape(1, 9), allowed_token_ids=allowed))
    engine.add("other", [1], replace(GREEDY, structured_outputs=shape(1, 9)))
    deltas = run(engine)
    assert "leaves no token as output 1" in deltas["none left"][-1].error
    assert deltas["none left"][-1].finish_reason is FinishReason.ABORT
    assert tokens(deltas["other"]) == expected([1], replace(GREEDY, structured_outputs=shape(1, 9)))[0]


def test_min_tokens_and_stop_tokens_hold():
    engine = engine_of()
    plain = replace(GREEDY, structured_outputs=shape(2, 30))
    engine.add("long", [4], replace(plain, min_tokens=25))
    engine.add("stop", [4], replace(plain, stop_token_ids=[11]))
    deltas = run(engine)
    assert len(tokens(deltas["long"])) >= 25
    for i, token in enumerate(tokens(deltas["stop"])):
        allowed, may_end = rule("2:30", tokens(deltas["stop"])[:i])
        assert token in allowed or (may_end and token in (EOS, 11))


def test_bad_requests_are_refused():
    engine, plain = engine_of(), fake_engine()
    with pytest.raises(ConfigError, match="expected a model with a tokenizer"):
        plain.add("a", [1], replace(GREEDY, structured_outputs=shape(1, 9)))
    with pytest.raises(ConfigError, match="expected only where an answer is generated"):
        engine.add("a", [1], replace(GREEDY, structured_outputs=shape(1, 9)), generate=False)
    with pytest.raises(ConfigError, match=r"thinking: expected token ids of 0 to 52.*got 99"):
        engine.add("a", [1], GREEDY, thinking=Thinking(end=(99,)))
    with pytest.raises(ConfigError, match="expected at most"):
        engine.add("a", [1] * 600, replace(GREEDY, structured_outputs=shape(1, 9)))
    engine.add("a", [1], replace(GREEDY, structured_outputs=shape(1, 9)))
    with pytest.raises(ConfigError, match="already in use"):
        engine.add("a", [1], replace(GREEDY, structured_outputs=shape(1, 9)))
    engine.add("unlucky", [1], replace(GREEDY, structured_outputs=shape(13, 9)))
    deltas = run(engine)
    assert deltas["unlucky"][-1].error == "structured_outputs.regex: unlucky"
    assert not engine.has_work and tokens(deltas["a"])


@torch.inference_mode()
def test_aborted_while_compiling_is_forgotten():
    engine = engine_of()
    engine.add("a", [1], replace(GREEDY, structured_outputs=shape(1, 9)))
    engine.abort("a")
    assert not engine.has_work and run(engine) == {}
