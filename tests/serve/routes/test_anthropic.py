"""/v1/messages with the real `anthropic` client, on written answers."""

import http.client
import json

import anthropic
import httpx
import pytest
from scripted import script
from servers import KEY, ThreadServer, bearer
from test_responses import ANSWERS, TEMPLATE

from qrt.serve.settings import MAX_BODY_BYTES

pytestmark = pytest.mark.model
TOOL = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
ALWAYS = {"extra_body": {"ignore_eos": True}}
BODY = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def server():
    with ThreadServer(
        kv="fp16", chat_template=TEMPLATE, tool_call_parser="hermes", reasoning_parser="qwen3"
    ) as running:
        script(running.engine, running.tokenizer, ANSWERS)
        yield running


@pytest.fixture(scope="module")
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def raw(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        yield client


def ask(text, **more):
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "max_tokens": 200, "messages": messages, **ALWAYS, **more}


def test_text(client):
    reply = client.messages.create(**ask("plain"))
    (block,) = reply.content
    assert (block.type, block.text, reply.stop_reason) == ("text", "It rains.", "end_turn")
    assert reply.stop_sequence is None and reply.role == "assistant" and reply.type == "message"
    assert reply._request_id.startswith("req_") and reply.usage.output_tokens > 2
    again = client.messages.create(**ask("plain"))
    first, second = reply.usage, again.usage
    assert second.cache_read_input_tokens > 0, "the prefix cache has the prompt"
    assert sum((first.input_tokens, first.cache_read_input_tokens)) == sum(
        (second.input_tokens, second.cache_read_input_tokens)
    )


def test_tools_in_a_loop(client):
    reply = client.messages.create(**ask("asks", tools=[TOOL]))
    text, call = reply.content
    assert text.text == "Let me see." and reply.stop_reason == "tool_use"
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Köln"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "plain"}]}
    turn = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(**{**ask("", tools=[TOOL]), "messages": turn})
    assert again.content[0].text == "It rains." and again.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}])
def test_calls_one_at_a_time(client, choice):
    reply = client.messages.create(**ask("twice", tools=[TOOL], tool_choice=choice))
    assert len(reply.content) == (1 if "disable_parallel_tool_use" in choice else 2)


def test_thinking_is_a_block(client):
    reply = client.messages.create(**ask("ponder", thinking={"type": "adaptive"}))
    thinking, text = reply.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Hm.", "It rains.")
    assert thinking.signature and reply.stop_reason == "end_turn"


@pytest.mark.parametrize("text", ["plain", "asks", "ponder"])
def test_the_clients_own_stream_adds_up_to_the_whole(client, text):
    whole = client.messages.create(**ask(text, tools=[TOOL]))
    with client.messages.stream(**ask(text, tools=[TOOL])) as stream:
        events = list(stream)
        final = stream.get_final_message()
    own = {"id", "signature"}
    assert [block.model_dump(exclude=own) for block in final.content] == [
        block.model_dump(exclude=own) for block in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    raw = [event.type for event in events if event.type.startswith(("message", "content_block"))]
    kinds = [kind for at, kind in enumerate(raw) if at == 0 or raw[at - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block * len(whole.content), "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "more, reason, stopped",
    [({"max_tokens": 1}, "max_tokens", None), ({"stop_sequences": ["rain"]}, "stop_sequence", "rain")],
)
def test_reasons_to_stop(client, more, reason, stopped, stream):
    if stream:
        with client.messages.stream(**ask("plain", **more)) as running:
            reply = running.get_final_message()
    else:
        reply = client.messages.create(**ask("plain", **more))
    assert (reply.stop_reason, reply.stop_sequence) == (reason, stopped)


def test_an_answer_may_fill_the_context(server, client):
    """litellm asks for 128,000 tokens, whatever the model."""
    with client.messages.stream(**ask(" the" * 1990, max_tokens=128_000)) as running:
        reply = running.get_final_message()
    usage, most = reply.usage, server.service.client.info.max_model_len
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == most
    assert reply.stop_reason == "model_context_window_exceeded"


def test_counted_tokens_are_those_that_run(client):
    given = {"model": "tiny", "messages": ask("plain")["messages"], "system": "S", "tools": [TOOL]}
    usage = client.messages.create(**given, max_tokens=1).usage
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert client.messages.count_tokens(**given).input_tokens == total


def test_blocks_become_the_messages_of_a_chat(server, client):
    """As Claude Code sends them."""
    prompts, real = [], server.service.tokenizer.encode
    thought = {"type": "thinking", "thinking": "R", "signature": "s"}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "Rom"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "U", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"},
                                          {"type": "text", "text": "A"}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "O"},
                                     {"type": "tool_result", "tool_use_id": "c", "is_error": True},
                                     {"type": "text", "text": "V"}]},
        {"role": "assistant", "content": "It"},
    ]  # fmt: skip
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    system = [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "S"}]
    server.service.tokenizer.encode = lambda text, *more, **named: (
        prompts.append(text) or real(text, *more, **named)
    )
    try:
        client.beta.messages.create(
            model="tiny", max_tokens=2, system=system, messages=messages, metadata={"user_id": "u"},
            betas=["x-2025-01-01"],
            extra_body={"temperature": 1, "top_k": 3, "context_management": edits},
        )  # fmt: skip
    finally:
        server.service.tokenizer.encode = real
    assert prompts[:1] == ["<system>S<user>U<assistant>A(R)[f Rom]<tool>O<tool><user>V<assistant>It"]


@pytest.mark.parametrize(
    "field, code, name",
    [
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"model": "x"}, 404, "model"),
        ({"max_tokens": 2**31}, 400, "max_tokens"),
        ({"stop_sequences": ["x"] * 17}, 400, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 501, "messages.0.content.0.type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
        ({"system": [{"type": "image"}]}, 501, "system.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 501, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, 400, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, 400, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, 501, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "compact"}]}}, 501, "context_management.edits"),
        ({"n": 2}, 501, "n"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_errors_have_anthropics_shape(raw, field, code, name):
    reply = raw.post("/v1/messages?beta=true", json={**BODY, **field})
    error = reply.json()
    kind = "not_found_error" if code == 404 else "invalid_request_error"
    assert (reply.status_code, error["type"], error["error"]["type"]) == (code, "error", kind), error
    assert error["error"]["message"].startswith(f"{name}:"), error
    assert error["request_id"] == reply.headers["request-id"]


def test_errors_before_and_around_the_route(server, raw, client):
    """Keys, paths, methods, media types, sizes and the state of the server."""
    paths = ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches")
    for path in paths:
        reply = httpx.post(f"{server.url}{path}", headers={"x-api-key": "wrong"}, json=BODY)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
    got = [raw.post(paths[2], json=BODY), raw.get(paths[0]), raw.post(paths[0], content=b"{")]
    assert [reply.json()["error"]["type"] for reply in got[:1]] == ["not_found_error"]
    assert [reply.status_code for reply in got] == [404, 405, 415]
    assert all(reply.json()["type"] == "error" for reply in got)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest("POST", paths[0])
    connection.putheader("Content-Length", str(MAX_BODY_BYTES + 1))
    connection.endheaders()
    huge = connection.getresponse()
    assert (huge.status, json.load(huge)["error"]["type"]) == (413, "request_too_large")
    server.service.draining = True
    try:
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**ask("plain"))
    finally:
        server.service.draining = False
    assert caught.value.status_code == 529 and caught.value.body["error"]["type"] == "overloaded_error"


def test_a_key_may_come_as_x_api_key(server):
    for path in ("/v1/models", "/metrics"):
        assert httpx.get(f"{server.url}{path}", headers={"X-API-Key": KEY}).status_code == 200
        for key in ("", "wrong", f"Bearer {KEY}"):
            assert httpx.get(f"{server.url}{path}", headers={"X-API-Key": key}).status_code == 401


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    model = client.models.retrieve("tiny")
    assert model.type == "model" and model.display_name == "tiny" and model.created_at.year > 2024
