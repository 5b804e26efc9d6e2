"""Prompts beyond the context: refused in the words that clients know them by, counted where they only ask."""

import re

import httpx
import pytest
from servers import KEY, ThreadServer, bearer

pytestmark = pytest.mark.model
CONTEXT = 256
LONG = "word " * 1000  # over the context
HUGE = LONG * 40  # so long that it is refused by its characters
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def server():
    with ThreadServer(kv="fp16", engine={"max_model_len": CONTEXT}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        yield client


def said(text):
    return [{"role": "user", "content": text}]


def tokens_of(server, messages):
    """The tokens of a conversation, by the tokenizer alone."""
    text = server.tokenizer.render_chat(messages, add_generation_prompt=True)
    return len(server.tokenizer.encode(text, add_special_tokens=False))


BEYOND = [
    (CHAT, {"messages": said(LONG)}),
    (CHAT, {"messages": said(LONG), "stream": True}),
    (CHAT, {"messages": said(HUGE)}),
    (CHAT, {"messages": said("x"), "max_tokens": CONTEXT + 1}),
    (CHAT, {"messages": said("x"), "max_completion_tokens": CONTEXT + 1, "stream": True}),
    (TEXT, {"prompt": LONG}),
    (TEXT, {"prompt": ["x", LONG]}),
    (TEXT, {"prompt": [5] * CONTEXT}),  # no room for an answer
    (TEXT, {"prompt": [5] * (CONTEXT + 2), "echo": True, "max_tokens": 0}),
    (TEXT, {"prompt": LONG, "stream": True}),
    (RESPONSES, {"input": LONG}),
    (RESPONSES, {"input": LONG, "stream": True}),
    (RESPONSES, {"input": "x", "max_output_tokens": CONTEXT + 1}),
    ("/generate", {"inputs": LONG}),
    (CHAT + "/render", {"messages": said(LONG)}),
]


@pytest.mark.parametrize(("path", "body"), BEYOND)
def test_openai_clients_know_the_error(client, path, body):
    reply = client.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "context_length_exceeded"
    assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]


def test_the_error_names_the_field_of_the_route(client):
    error = client.post(RESPONSES, json={"input": "x", "max_output_tokens": 999}).json()["error"]
    assert error["message"].startswith("max_output_tokens: expected at most 256 tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_clients_know_the_error(server, client, stream):
    """They read both numbers in order to know how much to leave out."""
    body = {"messages": said(LONG), "max_tokens": 5, "stream": stream}
    reply = client.post(MESSAGES, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error"
    count, most = map(
        int, re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"]).groups()
    )
    assert count == tokens_of(server, said(LONG)) and most == CONTEXT - 1
    message = client.post(MESSAGES, json={**body, "messages": said(HUGE)}).json()["error"]["message"]
    assert re.fullmatch(rf"prompt is too long: (\d+) tokens > {CONTEXT} maximum", message)


def test_the_longest_prompt_is_answered(client):
    """The bound in the error is the bound that holds."""
    reply = client.post(TEXT, json={"prompt": [5] * (CONTEXT - 1), "ignore_eos": True})
    assert reply.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("text", ["Hi", LONG, HUGE])
def test_counts_have_no_bound(server, client, text):
    """A client asks for the count in order to shorten what is too long."""
    wanted = tokens_of(server, said(text))
    count = client.post(MESSAGES + "/count_tokens", json={"messages": said(text)}).json()
    assert count == {"input_tokens": wanted}
    count = client.post(RESPONSES + "/input_tokens", json={"input": text, "model": "tiny"}).json()
    assert count == {"object": "response.input_tokens", "input_tokens": wanted}
    assert client.post("/tokenize", json={"messages": said(text)}).json()["count"] == wanted
    reply = client.post("/tokenize", json={"prompt": text}).json()
    assert reply["tokens"] == server.tokenizer.encode(text)


def test_counts_of_instructions_and_calls(server, client):
    """What is counted is the prompt that a response of the same body has."""
    items = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go"},
    ]
    body = {"input": items, "instructions": "Be brief.", "tools": [], "tool_choice": "auto"}
    count = client.post(RESPONSES + "/input_tokens", json=body).json()["input_tokens"]
    assert (
        count == client.post(RESPONSES, json={**body, "max_output_tokens": 1}).json()["usage"]["input_tokens"]
    )
    assert client.post(RESPONSES + "/input_tokens", json={**body, "model": "no"}).status_code == 404
    assert httpx.post(f"{server.url}{RESPONSES}/input_tokens", json=body).status_code == 401


def test_codes_that_clients_know(server, client):
    body = {"messages": said("Hi"), "max_tokens": 1}
    error = client.post(CHAT, json={**body, "model": "no"}).json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert client.get("/v1/models/no").json()["error"]["code"] == "model_not_found"
    assert client.get("/nowhere").json()["error"]["code"] == 404
    wrong = httpx.post(f"{server.url}{CHAT}", json=body, headers=bearer(KEY + "x"))
    assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
    assert client.post(CHAT, json={**body, "n": 0}).json()["error"]["code"] == 400
