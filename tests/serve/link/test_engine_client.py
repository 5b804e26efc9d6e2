"""Streams of an engine's client: nothing is lost or reordered however late a reader comes."""

import asyncio

import numpy as np
import pytest

from qrt.answers.processor import TOKENS_AT_ONCE, OutputProcessor
from qrt.engine.schedule.logprobs import LogprobRows
from qrt.engine.schedule.output import StepDelta, merge
from qrt.engine.schedule.request import FinishReason
from qrt.errors import ConfigError, QueueFullError
from qrt.request.sampling import SamplingParams
from qrt.serve.link.engine_client import EngineClient, EngineError
from qrt.serve.link.messages import Add, Refusal
from qrt.serve.link.step_output import StepOutput
from qrt.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model


class Client(EngineClient):
    """Of no engine: the test plays it, through `_handle`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def _send(self, message) -> None:
        self.sent.append(message)


def scores(tokens):
    values, ids = np.array(tokens, np.float32), np.array(tokens, np.int64)
    return LogprobRows(-values, ids, ids[:, None], -values[:, None])


def collector(n: int = 1, **params) -> OutputProcessor:
    tokenizer = Tokenizer("tiny")
    return OutputProcessor(
        "r", None, tokenizer.encode("The"), SamplingParams(n=n, max_tokens=50, **params), tokenizer
    )


async def submit(client, some, **options):
    submitting = asyncio.create_task(client.submit([some], **options))
    await asyncio.sleep(0)
    ids = [message.id for message in client.sent if isinstance(message, Add)]
    client._handle(StepOutput(ids, [], []))
    return await submitting, ids


def test_merged_deltas_are_the_sum():
    parts = [
        StepDelta("r", (), prompt_scores=scores([7, 8]), num_cached=3),
        StepDelta("r", (1,), logprobs=scores([1]), prompt_scores=scores([9])),
        StepDelta("r", (2, 3), FinishReason.STOP, 3, logprobs=scores([2, 3])),
    ]
    whole = merge(parts)
    assert whole.token_ids == (1, 2, 3) and whole.finish_reason is FinishReason.STOP
    assert whole.stop_reason == 3 and whole.num_cached == 3
    assert whole.logprobs.ranks.tolist() == [1, 2, 3] and whole.prompt_scores.ranks.tolist() == [7, 8, 9]
    assert merge(parts[:1]) is parts[0]


def test_waiting_outputs_merge_to_one_delta_per_request():
    async def work():
        client = Client()
        stream, (one, two) = await submit(client, collector(n=2))
        assert not stream.waiting
        for token in (65, 66, 67):
            client._handle(StepOutput([], [], [StepDelta(one, (token,)), StepDelta(two, (token + 10,))]))
        client._handle(StepOutput([], [], [StepDelta(two, (90,), FinishReason.LENGTH)]))
        assert stream.waiting
        got = [await anext(stream), await anext(stream)]
        assert [(delta.index, tuple(delta.token_ids), delta.finish_reason) for _, delta in got] == [
            (0, (65, 66, 67), None),
            (1, (75, 76, 77, 90), "length"),
        ]
        assert not stream.waiting and client.num_running == 1
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        client._handle(StepOutput([], [], [StepDelta(one, (70,), FinishReason.LENGTH)]))
        assert (await reading)[1].token_ids == (70,)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert client.num_running == 0 and not [m for m in client.sent if not isinstance(m, Add)]

    asyncio.run(work())


def test_whole_replies_decode_many_tokens_at_once():
    async def work():
        client = Client()
        stream, (one, two) = await submit(client, collector(n=2), whole=True)
        for token in range(65, 65 + TOKENS_AT_ONCE):
            assert not stream.waiting
            client._handle(StepOutput([], [], [StepDelta(one, (token,))]))
        assert len((await anext(stream))[1].token_ids) == TOKENS_AT_ONCE
        client._handle(StepOutput([], [], [StepDelta(two, (80,))]))
        assert not stream.waiting
        client._handle(StepOutput([], [], [StepDelta(two, (81,), FinishReason.LENGTH)]))
        client.abort([one])
        ends = [await anext(stream), await anext(stream)]
        assert [(tuple(delta.token_ids), delta.finish_reason) for _, delta in ends] == [
            ((80, 81), "length"),
            ((), "abort"),
        ]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(work())


def test_tokens_before_a_failure_are_still_given():
    async def work():
        client = Client()
        stream, (one,) = await submit(client, collector())
        client._handle(StepOutput([], [], [StepDelta(one, (65,))]))
        client.stop("gone")
        assert (await anext(stream))[1].token_ids == (65,)
        with pytest.raises(EngineError, match="gone"):
            await anext(stream)

    asyncio.run(work())


@pytest.mark.parametrize("busy, error", [(False, ConfigError), (True, QueueFullError)])
def test_a_refusal_raises_in_submit(busy, error):
    async def work():
        client = Client()
        submitting = asyncio.create_task(client.submit([collector(n=2)]))
        await asyncio.sleep(0)
        first, second = (message.id for message in client.sent)
        client._handle(StepOutput([first], [Refusal(second, "no", busy)], []))
        with pytest.raises(error, match="no"):
            await submitting
        assert client.num_running == 0, "the accepted one is ended too"
        assert first in client.sent[-1].ids

    asyncio.run(work())
