"""NaN and infinity of a model end the request that they belong to, and no other."""

import numpy as np
import pytest
import torch
from fake_decoder import FakeDecoder, _states, fake_engine, greedy, run, tokens

from qrt import LLM, SamplingParams
from qrt.engine.schedule.logprobs import LogprobRows
from qrt.engine.schedule.request import FinishReason
from qrt.engine.step.graphs import TokenSteps
from qrt.engine.step.logprobs import score
from qrt.errors import QrtError
from tiny_models import shallow

NAN, INF = float("nan"), float("inf")
LONG = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CLEAN = {"a": [3, 1, 4], "b": [1, 5, 9, 2]}


class BadDecoder(FakeDecoder):
    """A FakeDecoder whose logits are not finite after given contexts, by their hash."""

    def __init__(self, value: float = NAN) -> None:
        super().__init__()
        self.value = value
        self.bad: set[int] = set()

    def mark(self, context: list[int]) -> None:
        self.bad.add(int(_states(torch.tensor(context))[-1]))

    def logits(self, hidden):
        logits = super().logits(hidden)
        rows = [int(state) in self.bad for state in hidden[:, 0]]
        logits[torch.tensor(rows, dtype=torch.bool), 20] = self.value
        return logits


def engine_of(value=NAN, after=4, prompt=(8, 8, 2), **settings):
    """An engine, and the tokens of `prompt` before the model fails at output token `after` + 1."""
    model = BadDecoder(value)
    good = greedy(list(prompt), after)
    model.mark([*prompt, *good])
    return fake_engine(model, **settings), good


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("own", [
    {}, {"logprobs": 2}, {"top_p": 0.9, "temperature": 1e-3}, {"repetition_penalty": 1.0001},
    {"bad_words": ((52,),)},
])  # fmt: skip
def test_one_row_ends_and_the_others_go_on(overlap, value, after, own):
    engine, good = engine_of(value, after, overlap=overlap)
    given = {**CLEAN, "bad": [8, 8, 2]}
    for name, prompt in given.items():
        params = LONG if name != "bad" else SamplingParams(**{"max_tokens": 12, "temperature": 0, **own})
        engine.add(name, prompt, params)
    deltas = run(engine)
    for name, prompt in CLEAN.items():
        assert tokens(deltas[name]) == greedy(prompt, 12)
    assert tokens(deltas["bad"]) == good
    last = deltas["bad"][-1]
    assert (
        last.finish_reason is FinishReason.ABORT
        and f"output token {after + 1}: expected finite" in last.error
    )
    assert engine.scheduler.num_corrupted == 1
    engine.scheduler.kv.check()


def test_a_prompt_that_fails_is_not_shared():
    engine, _ = engine_of(after=0, prompt=tuple(range(20)))
    for name in ("first", "second"):
        engine.add(name, list(range(20)), LONG)
        assert run(engine)[name][-1].error
    assert engine.scheduler.kv.stats.hit_tokens == 0 and engine.scheduler.num_corrupted == 2


def test_scores_of_a_prompt_name_the_token():
    model = BadDecoder()
    prompt = list(range(10, 30))
    model.mark(prompt[:7])
    engine = fake_engine(model, max_num_batched_tokens=5)
    engine.add("bad", prompt, SamplingParams(prompt_logprobs=0, max_tokens=1), generate=False)
    engine.add("good", prompt[:6], SamplingParams(prompt_logprobs=0, max_tokens=1), generate=False)
    deltas = run(engine)
    assert "prompt token 7: expected finite" in deltas["bad"][-1].error
    assert deltas["good"][-1].error is None


@pytest.mark.parametrize("row", [[1.0, NAN, 0.0], [INF, 0.0, 0.0], [0.0, INF, 1.0], [-INF, -INF, -INF]])
def test_log_probabilities_of_such_rows_are_nan(row):
    """Also of a token whose own logit is a number, which would get -inf."""
    logits = torch.tensor([row, [0.0, -INF, 1.0]])
    scores = score(logits, torch.tensor([2, 1]), 1).on_host()
    assert np.isnan(scores.logprobs[0]) and scores.logprobs[1] == -np.inf


@pytest.mark.model
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("kv", ["fp16", "int8", "int4"])
def test_a_model_whose_activations_are_nan(tmp_path_factory, device, kv, padded):
    """A token's embedding is NaN, so its row is NaN in each layer and in the cache; others share its steps.

    Padded steps run as on a GPU, where the step after reads a token of the row that has ended.
    """
    with shallow(tmp_path_factory.getbasetemp()):
        llm = LLM("tiny", kv=kv, device=device.type, max_model_len=128, overlap=True, enforce_eager=True)
    engine, runner = llm.engine, llm.engine.runner
    if padded and runner.token_steps is None:
        runner.token_steps = TokenSteps(runner.model, runner.kv, runner.table, [8])
    prompts = [[5, 6, 7] * 9, [9, 8, 5], [40, 41, 42, 43]]

    def answers(given):
        for name, ids in given.items():
            engine.add(name, ids, LONG)
        return run(engine)

    alone = [tokens(own) for own in answers(dict(zip("abc", prompts, strict=True))).values()]
    runner.model.embed.weight = runner.model.embed.weight.clone()  # the head may have it too
    runner.model.embed.weight[300] = NAN
    for position in range(4):
        engine.reset_prefix_cache()
        named = dict(zip("abc", prompts, strict=True))
        names = [*named][:position] + ["bad"] + [*named][position:]
        deltas = answers({name: named.get(name, [11, 300, 12]) for name in names})
        assert deltas.pop("bad")[-1].error
        assert [tokens(deltas[name]) for name in "abc"] == alone


def test_scores_without_faults_are_none():
    from qrt.engine.schedule.finite import prompt_fault, token_fault

    sure = LogprobRows(np.array([-np.inf], np.float32), np.ones(1, np.int64), *[np.empty((1, 0))] * 2)
    assert token_fault(0, 1, sure) is None and prompt_fault(0, sure, np.zeros((1, 2))) is None
    assert "vector" in (prompt_fault(0, None, np.array([[1.0, np.inf]])) or "")


@pytest.mark.model
def test_the_other_answers_are_kept(tmp_path_factory):
    with shallow(tmp_path_factory.getbasetemp()):
        llm = LLM("tiny", device="cpu", max_model_len=128)
    llm.engine.model.embed.weight = llm.engine.model.embed.weight.clone()
    llm.engine.model.embed.weight[300] = NAN
    good, bad = {"prompt_token_ids": [9, 8, 5]}, {"prompt_token_ids": [11, 300, 12]}
    outputs = [one.outputs[0] for one in llm.generate([bad, good, bad], LONG)]
    assert [one.finish_reason for one in outputs] == ["error", "length", "error"]
    assert "output token 1: expected finite" in outputs[0].error and len(outputs[1].token_ids) == 12
    with pytest.raises(QrtError, match="output token 1: expected finite"):
        llm.generate([bad], LONG)
    with pytest.raises(QrtError, match="prompt token 1: expected finite"):
        llm.score([[9, 8, 5], [300, 12, 13]])
    assert llm.generate([good], LONG)[0].outputs[0].token_ids == outputs[1].token_ids
