"""The HTTP server with the real `openai` client over a real socket, on the bundled model."""

import asyncio
import json
import time

import httpx
import openai
import pytest
from servers import KEY, ThreadServer, bearer, refused, wait_idle, wait_until

from qrt import LLM, SamplingParams

pytestmark = pytest.mark.model
JSON = {"Content-Type": "application/json"}
PROMPTS = ["The president of the", "In this chapter", "When a function is called"]


# a prompt reads its own K and V back: whether some test has had it before, and it is cached, changes nothing
ENGINE = {"attend_cache": True}


@pytest.fixture(scope="module")
def server():
    with ThreadServer(kv="int8", engine=ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def offline():
    params = SamplingParams(temperature=0, max_tokens=24)
    llm = LLM("tiny", kv="int8", **ENGINE)
    return [o.outputs[0] for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_completion_equals_the_python_api(client, offline):
    reply = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=24, temperature=0)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [choice.text for choice in reply.choices] == [output.text for output in offline]
    assert reply.usage.completion_tokens == sum(len(output.token_ids) for output in offline)
    assert {choice.finish_reason for choice in reply.choices} <= {"length", "stop"}


def test_stream_adds_up_to_the_whole(client, offline):
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPTS,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = ["", "", ""]
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [output.text for output in offline]
    assert len(chunks) > 24 and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == sum(len(output.token_ids) for output in offline)


def test_chat_and_its_stream_agree(client):
    arguments = {
        "model": "alias",
        "messages": [{"role": "user", "content": "What is a function?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    reply = client.chat.completions.create(**arguments)
    parts = [{"type": "text", "text": "What is a function?"}]
    streamed = client.chat.completions.create(
        **{**arguments, "messages": [{"role": "user", "content": parts}]}, stream=True
    )
    chunks = list(streamed)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == reply.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == reply.choices[0].finish_reason
    assert reply.choices[0].message.role == "assistant" and reply.object == "chat.completion"


def test_logprobs_in_both_shapes(client):
    reply = client.completions.create(
        model="tiny", prompt=PROMPTS[0], max_tokens=5, temperature=0, logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert all(
        max(top.values()) == own
        for top, own in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(5)]
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"skip_special_tokens": False},
    )
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    assert len(content) == chat.usage.completion_tokens
    assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].logprob == e.logprob for e in content)


def test_n_seed_stop_and_echo(client):
    arguments = {
        "model": "tiny",
        "prompt": PROMPTS[1],
        "max_tokens": 12,
        "n": 3,
        "seed": 11,
        "temperature": 1.0,
    }
    first, second = (client.completions.create(**arguments) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) > 1
    whole = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0)
    stop = whole.choices[0].text[8:12]
    cut = client.completions.create(
        model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0, stop=[stop], echo=True
    )
    text = whole.choices[0].text
    assert cut.choices[0].text == PROMPTS[0] + text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_async_clients_at_once(server):
    async def run():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        calls = [
            client.completions.create(model="tiny", prompt=prompt, max_tokens=8 + i % 5, temperature=0)
            for i, prompt in enumerate(PROMPTS * 8)
        ]
        return await asyncio.gather(*calls)

    replies = asyncio.run(run())
    assert all(reply.usage.completion_tokens <= 8 + i % 5 for i, reply in enumerate(replies))


def test_a_client_that_leaves_frees_its_slots(server, client):
    stream = client.completions.create(
        model="tiny",
        prompt=PROMPTS[0],
        max_tokens=1500,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    wait_idle(server)
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(), timeout=0.3)
    time.sleep(0.5)  # should it have left before the engine met it
    wait_idle(server)


def test_models_and_health(server, client):
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == server.engine.max_model_len
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_errors_have_openais_shape(server, client):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=9)
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model="tiny", prompt=[5] * 5000)
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model="tiny", prompt=[5] * 5000, stream=True)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="tiny", prompt=[10**6])
    reply = httpx.post(f"{server.url}/v1/completions", content=b"{", headers={**bearer(), **JSON})
    assert reply.status_code == 400 and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server.url}/nowhere", headers=bearer()).json()["error"]["code"] == 404


def test_a_key_is_wanted_everywhere_but_health(server):
    for headers in ({}, bearer("wrong"), {"Authorization": "Bearer"}):
        reply = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert reply.status_code == 401 and reply.json()["error"]["type"] == "AuthenticationError"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0).models.list()


def test_shutdown_answers_503_with_retry_after():
    """503 with Retry-After, not a failure of the server."""
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}

    async def run():
        async with httpx.AsyncClient(base_url=server.url, headers=bearer(), timeout=60) as client:
            asked = [
                client.post("/v1/completions", json={**body, "stream": stream}) for stream in (False, True)
            ]
            tasks = [asyncio.create_task(reply) for reply in asked]
            await wait_until(lambda: server.service.client.num_running == 2)
            server.service.client._loop.call_soon_threadsafe(server.server.drain)
            return await asyncio.gather(*tasks)

    with ThreadServer(kv="fp16", shutdown_timeout=0.3) as server:
        whole, stream = asyncio.run(run())
    assert "shutting down" in refused(whole, 503) and whole.headers["Retry-After"] == "5"
    *_, error, done, _ = stream.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503 and done == "data: [DONE]"


def test_an_engine_that_dies_fails_requests_and_health():
    with ThreadServer(kv="fp16") as dying:
        client = openai.OpenAI(base_url=f"{dying.url}/v1", api_key=KEY, max_retries=0)

        def broken():
            raise RuntimeError("the device is gone")

        dying.engine.step = broken
        for _ in range(2):  # the request in flight, and one that comes later
            with pytest.raises(openai.InternalServerError, match="stopped"):
                client.completions.create(model="tiny", prompt="x")
        assert httpx.get(f"{dying.url}/health").status_code == 503
