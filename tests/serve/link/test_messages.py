"""Messages survive the socket unchanged, and nothing but messages is taken from it."""

import msgspec
import numpy as np
import pytest
import torch

from qrt import SamplingParams
from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.engine.step.logprobs import score
from qrt.request.thinking import Thinking
from qrt.serve.link.messages import Abort, Add, Failed, Hello, Refusal, decode_to_engine, encode, fields_of
from qrt.serve.link.step_output import StepOutput, decode_from_engine


def test_to_the_engine():
    params = SamplingParams(temperature=0.5, stop=["a", "b"], stop_token_ids=[3], seed=-5)
    add = Add("id", [1, 2, 3], fields_of(params), 12.5)
    for message in (add, Abort(["id"]), Failed(404), Hello()):
        assert decode_to_engine(encode(message)) == message or message is add
    assert SamplingParams(**decode_to_engine(encode(add)).params) == params


def test_what_a_request_says_of_its_thinking():
    thinking = Thinking((7, 8), (5,), inside=True, budget=3, closing=(9, 7, 8))
    add = Add("id", [1], fields_of(SamplingParams()), 12.5, thinking=thinking)
    assert decode_to_engine(encode(add)).thinking == thinking
    assert decode_to_engine(encode(Add("id", [1], {}, 12.5))).thinking is None


def test_a_step_with_logprobs():
    logits = torch.randn(2, 50)
    scores = score(logits, torch.tensor([3, 4]), 5).on_host()
    deltas = [
        StepDelta("a", (7,), FinishReason.STOP, 7, logprobs=scores.part(0, 1, 0)),
        StepDelta("b", (9,), prompt_scores=scores, num_cached=3),
        StepDelta("c", error="gone", finish_reason=FinishReason.ABORT),
    ]
    output = decode_from_engine(encode(StepOutput(["a"], [Refusal("d", "no", True)], deltas)))
    assert output.accepted == ["a"] and output.refused == [Refusal("d", "no", True)]
    for ours, theirs in zip(output.deltas, deltas, strict=True):
        assert ours[:4] == theirs[:4] and ours[6:] == theirs[6:]
        for one, other in ((ours.logprobs, theirs.logprobs), (ours.prompt_scores, theirs.prompt_scores)):
            assert (one is None) == (other is None)
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
                if one is not None:
                    assert np.array_equal(getattr(one, name), getattr(other, name))
                    assert getattr(one, name).dtype == getattr(other, name).dtype
                    assert getattr(one, name).flags.writeable, "callers get tensors of the same memory"


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"\x93\xa3Add\x01\x02", b"\x91\xa4Nope", b"\xc1"])
def test_anything_else_is_refused(data):
    for decode in (decode_to_engine, decode_from_engine):
        with pytest.raises(msgspec.DecodeError):
            decode(data)
