"""The usage in every chunk of a stream (`continuous_usage_stats`)."""

import json

import httpx
import pytest
from servers import bearer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        yield client


def usages(client, url, body):
    """Return (contents, completion_tokens) of each chunk of a stream, and the last usage."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    with client.stream("POST", url, json={**body, "stream": True, "stream_options": options}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    return chunks[:-1], chunks[-1]["usage"]


@pytest.mark.parametrize("n", [1, 3])
def test_usage_of_every_chunk(client, n):
    """Counts are 0 in the chunks with the role, and rise with each token."""
    body = {"messages": [{"role": "user", "content": "Tell"}], "max_tokens": 6, "min_tokens": 6, "n": n}
    chunks, usage = usages(client, "/v1/chat/completions", {**body, "temperature": 0})
    roles = [chunk for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert chunks[:n] == roles and [chunk["choices"][0]["index"] for chunk in roles] == list(range(n))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[:n] == [0] * n and all(a < b for a, b in zip(counts[n - 1 :], counts[n:], strict=False))
    assert counts[-1] == usage["completion_tokens"] == 6 * n
    for chunk in chunks:
        own = chunk["usage"]
        assert own["total_tokens"] == own["prompt_tokens"] + own["completion_tokens"]


def test_usage_of_an_echo(client):
    body = {"prompt": ["One", "Two"], "echo": True, "max_tokens": 3, "ignore_eos": True}
    chunks, usage = usages(client, "/v1/completions", body)
    assert chunks[0]["choices"][0]["text"] == "One" and chunks[0]["usage"]["completion_tokens"] == 0
    assert chunks[-1]["usage"]["completion_tokens"] == usage["completion_tokens"] == 6
