"""The whole loop under random load, on a model that notices a wrong slot, position or row.

Whatever arrives when, is aborted, paused, cut into chunks or served from the prefix cache: every request ends
exactly once with exactly the tokens that it gets alone, and all slots come back.
"""

import random
from dataclasses import replace

import pytest
import torch
from fake_decoder import EOS, VOCAB, FakeDecoder, fake_engine, greedy, next_logits, run, tokens

from qrt.config import SamplingParams
from qrt.engine import scheduler
from qrt.engine.request import FinishReason

_alone = fake_engine(max_num_seqs=1, enable_prefix_caching=False)


def alone(prompt, params):
    """Tokens, reason and scored prompt of a request that has the engine for itself."""
    _alone.add("alone", prompt, replace(params, logprobs=None))
    deltas = run(_alone)["alone"]
    return tokens(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason


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
    )


def random_prompt(rng, shared):
    prefix = rng.choice(shared)[: rng.choice([0, 4, 15, 16, 30])]
    return prefix + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]


def check_logprobs(prompt, params, deltas):
    """The reported log-probabilities are those of the definition, each token once."""
    sequence = prompt + tokens(deltas)
    truth = next_logits(sequence).log_softmax(-1)
    if params.logprobs is not None:
        scores = torch.cat([delta.logprobs.logprobs for delta in deltas if delta.token_ids])
        places = range(len(prompt) - 1, len(sequence) - 1)
        expected = [truth[place, sequence[place + 1]] for place in places]
        torch.testing.assert_close(scores, torch.stack(expected))
    if params.prompt_logprobs is not None:
        scores = [delta.prompt_scores for delta in deltas if delta.prompt_scores]
        expected = truth[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.long)]
        torch.testing.assert_close(torch.cat([torch.empty(0)] + [s.logprobs for s in scores]), expected)
        top = truth[: len(prompt) - 1].topk(params.prompt_logprobs).values
        got = torch.cat([torch.empty(0, params.prompt_logprobs)] + [s.top_logprobs for s in scores])
        torch.testing.assert_close(got, top)


@pytest.mark.parametrize("seed", range(16))
def test_every_request_ends_once_with_the_tokens_it_gets_alone(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(scheduler, "LOOKAHEAD_TOKENS", rng.choice([0, 0, 3, 64]))
    monkeypatch.setattr(scheduler, "GROW_TOKENS", rng.choice([1, 5]))
    engine = fake_engine(
        pool=rng.choice([48, 64, 80, 256]),
        max_model_len=48,
        max_num_seqs=rng.choice([2, 6, 6, 12]),
        max_num_batched_tokens=rng.choice([2, 7, 16, 16, 64, 512]),
        enable_prefix_caching=rng.random() < 0.7,
    )
    shared = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    pending = {str(i): (random_prompt(rng, shared), random_params(rng)) for i in range(14)}
    added, deltas, ended, aborted = {}, {}, set(), set()
    for _ in range(5000):
        while pending and rng.random() < 0.6:
            name, (prompt, params) = pending.popitem()
            engine.add(name, prompt, params)
            added[name] = (prompt, params)
        if added and rng.random() < 0.01:
            name = rng.choice(list(added))
            engine.abort(name)
            aborted |= {name} - ended
        for delta in engine.step():
            name = delta.request_id
            assert name in added and name not in ended and name not in aborted, "answered twice or unasked"
            deltas.setdefault(name, []).append(delta)
            if delta.finish_reason:
                ended.add(name)
        engine.scheduler.kv.check()
        queue = [request.id for request in (*engine.scheduler.running, *engine.scheduler.waiting)]
        assert queue == [name for name in added if name in queue], "not in order of arrival"
        if not pending and not engine.has_work:
            break
    assert ended | aborted == set(added) and not engine.has_work
    for name in ended:
        prompt, params = added[name]
        limit = engine.max_model_len - len(prompt)
        wanted = replace(params, max_tokens=min(params.max_tokens or limit, limit))
        last = deltas[name][-1]
        assert (tokens(deltas[name]), last.finish_reason, last.stop_reason) == alone(prompt, wanted)
        check_logprobs(prompt, params, deltas[name])
    kv = engine.scheduler.kv
    assert kv.available == kv.num_slots and not engine.scheduler.running and not engine.scheduler.waiting
    assert len(engine.scheduler._rows) == min(
        engine.config.max_num_seqs, engine.config.max_num_batched_tokens
    )


@pytest.mark.parametrize("caching", [True, False])
def test_a_full_pool_pauses_the_last_and_loses_nothing(caching, monkeypatch):
    monkeypatch.setattr(scheduler, "LOOKAHEAD_TOKENS", 0)
    engine = fake_engine(pool=64, max_num_seqs=6, enable_prefix_caching=caching)
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


def test_lookahead_lets_no_request_in_that_would_be_paused_at_once():
    engine = fake_engine(pool=96, max_num_seqs=6)
    for i in range(6):
        engine.add(str(i), [i, 2, 3, 4], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    run(engine)
    assert engine.scheduler.num_pauses == 0


def test_a_failing_step_ends_its_requests_and_no_others():
    model = FakeDecoder()
    engine = fake_engine(model, pool=128, max_num_seqs=2)
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
    deltas = run(engine)
    assert tokens(deltas["stop"]) == wanted[: wanted.index(EOS) + 1]
    assert deltas["stop"][-1].finish_reason is FinishReason.STOP and deltas["stop"][-1].stop_reason is None
    assert tokens(deltas["go on"]) == wanted
    assert deltas["go on"][-1].finish_reason is FinishReason.LENGTH
    assert tokens(deltas["id"]) == wanted[: wanted.index(wanted[1]) + 1]
    assert deltas["id"][-1].stop_reason == wanted[1]
    assert EOS not in tokens(deltas["late"])[:late] and len(tokens(deltas["late"])) > late
