"""AsyncLLM: the same answers as LLM, aborts that give everything back, errors that name what is wrong."""

import asyncio
import gc
import weakref

import pytest
from servers import wait_until
from transformers import PreTrainedTokenizerBase

from qrt import LLM, AsyncLLM, SamplingParams
from qrt.errors import ConfigError, UnsupportedError
from qrt.serve.link.engine_client import EngineError

pytestmark = pytest.mark.model
PROMPTS = ["The president of the", "In this chapter", {"prompt_token_ids": [5, 6, 7]}]
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


async def last(outputs):
    texts = [""]
    async for output in outputs:
        assert output.outputs[0].text.startswith(texts[-1]), "outputs are cumulative"
        texts.append(output.outputs[0].text)
    assert output.finished
    return output


def idle(llm):
    engine = llm.client.router.engine
    return not engine.has_work and engine.scheduler.kv.available == engine.pool.num_slots


def test_answers_are_those_of_llm():
    params = SamplingParams(temperature=0, max_tokens=16, n=1, logprobs=2)
    wanted = LLM("tiny", kv="int8").generate(PROMPTS, params, use_tqdm=False)

    async def run():
        llm = AsyncLLM("tiny", kv="int8")
        try:
            return await asyncio.gather(*(last(llm.generate(prompt, params)) for prompt in PROMPTS))
        finally:
            await llm.shutdown()

    for output, other in zip(asyncio.run(run()), wanted, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        assert output.outputs[0].text == other.outputs[0].text
        assert len(output.outputs[0].logprobs) == 16 and output.prompt_token_ids == other.prompt_token_ids


def test_aborts_refusals_and_the_end():
    async def run():
        llm = AsyncLLM("tiny", kv="int8", max_model_len=2000)
        outputs = []
        async for output in llm.generate("The", LONG, request_id="a"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("a")
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        await llm.abort("a")  # no longer there: nothing happens
        async for _ in llm.generate("The", LONG, request_id="a"):  # the id is free again
            with pytest.raises(ConfigError, match="'a': already in use"):
                await anext(llm.generate("The", LONG, request_id="a"))
            break
        await wait_until(lambda: idle(llm))
        with pytest.raises(ConfigError, match="expected at most 1999"):
            await anext(llm.generate([5] * 3000, LONG))
        with pytest.raises(ConfigError, match="unknown key 'promt'"):
            await anext(llm.generate({"promt": "x"}))
        with pytest.raises(ConfigError, match="sampling_params: expected SamplingParams, got list"):
            await anext(llm.generate("x", [LONG]))
        with pytest.raises(UnsupportedError, match="lora_request: adapters are not supported"):
            await anext(llm.generate("x", LONG, lora_request=object()))
        with pytest.raises(UnsupportedError, match="AsyncLLM.sleep: weights stay on the device"):
            llm.sleep()
        running = llm.generate("The", LONG, lora_request=None, trace_headers={"a": "b"})
        await anext(running)
        for prompt, priority, message in (  # each is refused alone
            ({"prompt": "x", "cache_salt": ["a"]}, 0, "cache_salt: expected text"),
            ([[1, [2, 3]]], 0, "expected a list of token ids"),
            ("x", "a", "priority: expected an integer, got 'a'"),
        ):
            with pytest.raises(ConfigError, match=message):
                await anext(llm.generate(prompt, LONG, priority=priority))
        early = await anext(running)
        seen = list(early.outputs[0].token_ids)
        await anext(running)
        assert early.outputs[0].token_ids == seen, "an output is not changed by what comes later"
        await running.aclose()
        await llm.reset_prefix_cache()
        assert llm.client.router.engine.scheduler.kv.stats.evictable_slots == 0
        await llm.check_health()
        running = llm.generate("The", LONG)
        await anext(running)
        await llm.shutdown()
        with pytest.raises(EngineError, match="shut down"):
            await last(running)
        with pytest.raises(EngineError, match="shut down"):
            await anext(llm.generate("The", LONG))
        assert not llm.is_running

    asyncio.run(run())


@pytest.mark.usefixtures("unfrozen")
def test_abort_takes_several_ids():
    """As in vLLM."""

    async def run():
        llm = AsyncLLM("tiny", kv="int8")
        assert isinstance(llm.get_tokenizer(), PreTrainedTokenizerBase)
        running = {name: llm.generate("The", LONG, request_id=name) for name in "abc"}
        for outputs in running.values():
            await anext(outputs)
        assert gc.get_freeze_count() > 1000, "full collections are short meanwhile"
        await llm.abort(name for name in ("a", "not there", "b"))
        for name in "ab":
            assert (await last(running[name])).outputs[0].finish_reason == "abort"
        assert not (await anext(running["c"])).finished
        await llm.abort("c")
        assert (await last(running["c"])).outputs[0].finish_reason == "abort"
        assert gc.get_freeze_count() == 0
        await llm.shutdown()

    asyncio.run(run())


def test_reused_id_gets_no_tokens_of_its_last_request():
    async def run():
        llm = AsyncLLM("tiny")
        short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        wanted = await last(llm.generate(PROMPTS[2], short))
        left = llm.generate(PROMPTS[0], LONG, request_id="a")
        await anext(left)
        handle, late, held = llm.client._handle, True, []
        llm.client._handle = lambda message: held.append(message) if late else handle(message)
        await wait_until(lambda: any(message.deltas for message in held))
        await left.aclose()
        again = asyncio.create_task(last(llm.generate(PROMPTS[2], short, request_id="a")))
        await wait_until(lambda: llm.client.num_running)
        late = False
        for message in held:
            handle(message)
        output = await again
        assert output.outputs == wanted.outputs and output.request_id == "a"
        await llm.shutdown()

    asyncio.run(run())


def test_an_engine_that_is_dropped_ends_with_its_memory():
    llm = AsyncLLM("tiny")
    asyncio.run(last(llm.generate("The", SamplingParams(max_tokens=2))))
    engine, thread = weakref.ref(llm.client.router.engine), llm.client._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(60)
    gc.collect()
    assert not thread.is_alive() and engine() is None


def test_second_event_loop_is_refused():
    llm, params = AsyncLLM("tiny"), SamplingParams(max_tokens=2)
    asyncio.run(last(llm.generate("The", params)))
    for way in (lambda: last(llm.generate("The", params)), llm.reset_prefix_cache):
        with pytest.raises(
            ConfigError, match="expected the event loop it began in, got another; call asyncio.run once"
        ):
            asyncio.run(way())
    llm = AsyncLLM("tiny")
    asyncio.run(llm.shutdown())
    assert not llm.is_running
    with pytest.raises(EngineError, match="shut down"):
        asyncio.run(last(llm.generate("The", params)))


def test_vllms_way_to_make_one_is_named():
    with pytest.raises(UnsupportedError, match=r"from_engine_args: .* call AsyncLLM\(model, "):
        AsyncLLM.from_engine_args(object())
