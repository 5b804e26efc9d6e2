"""Values that ask for nothing change nothing, on every route that takes them."""

import json

import httpx
import pytest
from servers import bearer

from qrt.serve.routes.tools import Tool, ToolChoice

pytestmark = pytest.mark.model
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "Hi"}]
BODIES = {
    CHAT: {"messages": SAID, "max_tokens": 3, "temperature": 0},
    TEXT: {"prompt": "Hi", "max_tokens": 3, "temperature": 0},
    RESPONSES: {"input": "Hi", "max_output_tokens": 3, "temperature": 0},
    MESSAGES: {"messages": SAID, "max_tokens": 3, "temperature": 0},
    MESSAGES + "/count_tokens": {"messages": SAID},
    RESPONSES + "/input_tokens": {"input": "Hi"},
    "/tokenize": {"messages": SAID},
    CHAT + "/render": {"messages": SAID},
}
NOTHING = {
    "model": ["", None],
    "tools": [[], None],
    "functions": [[], None],
    "stop": [[], None, ""],
    "logit_bias": [{}, [], None],
    "bad_words": [[], None],
    "stop_token_ids": [[], None],
    "response_format": [{"type": "text"}, {}, None],
    "structured_outputs": [{}, None],
    "guided_regex": ["", None],
    "grammar": ["", {}, None],
    "stream_options": [None, {}, {"include_usage": False}],
    "reasoning": [{}, None],
    "reasoning_effort": ["", None],
    "thinking": [{}, None],
    "metadata": [{}, None],
    "logprobs": [None, False],
    "top_logprobs": [None, 0, False],
    "prompt_logprobs": [None],
    "n": [1, None],
    "best_of": [1, None],
    "parallel_tool_calls": [True, None],
    "chat_template_kwargs": [{}, None],
    "chat_template": ["", None],
    "audio": [{}, None],
    "prediction": [{}, None],
    "documents": [[], None],
    "thinking_token_budget": [-1, None],
    "lora": ["", None],
    "extra_body": [{}, None],
    "conversation": ["", {}, None],
    "context_management": [{}, None],
    "stop_sequences": [[], None],
    "include": [[], None],
}
TEXTS = (CHAT, TEXT, RESPONSES, RESPONSES + "/input_tokens", "/tokenize", CHAT + "/render")


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        yield client


def said(reply):
    """What a reply says beside its ids and times."""
    assert reply.status_code == 200, reply.text
    reply = reply.json()
    parts = [reply.get(name) for name in ("choices", "content", "token_ids", "tokens", "input_tokens")]
    texts = [item["content"][0]["text"] for item in reply.get("output") or ()]
    return json.dumps([parts, texts])


@pytest.mark.parametrize("path", BODIES)
def test_a_value_that_asks_for_nothing_changes_nothing(client, path):
    wanted = said(client.post(path, json=BODIES[path]))
    for name, values in NOTHING.items():
        for value in values:
            assert said(client.post(path, json={**BODIES[path], name: value})) == wanted, (name, value)


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": None}])
@pytest.mark.parametrize("choice", ["auto", "none", None, "", {}])
@pytest.mark.parametrize("path", TEXTS)
def test_a_choice_without_tools_asks_for_nothing(client, path, tools, choice):
    wanted = said(client.post(path, json=BODIES[path]))
    assert said(client.post(path, json={**BODIES[path], **tools, "tool_choice": choice})) == wanted


@pytest.mark.parametrize("kind", ["auto", "none"])
@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "/count_tokens"])
def test_anthropics_choice_without_tools_asks_for_nothing(client, path, kind):
    wanted = said(client.post(path, json=BODIES[path]))
    for tools in ({}, {"tools": []}, {"tools": None}):
        for choice in ({"type": kind}, {}):
            assert said(client.post(path, json={**BODIES[path], **tools, "tool_choice": choice})) == wanted


def test_no_effort_asks_for_nothing_where_nothing_thinks(client):
    wanted = said(client.post(TEXT, json=BODIES[TEXT]))
    assert said(client.post(TEXT, json={**BODIES[TEXT], "reasoning_effort": "none"})) == wanted
    assert client.post(TEXT, json={**BODIES[TEXT], "reasoning_effort": "high"}).status_code == 501


def test_an_empty_choice_leaves_the_tools_to_the_model():
    tools = [Tool(type="function", function={"name": "f"})]
    for choice in ("", {}):
        assert ToolChoice.of(choice, tools, True) == ToolChoice.of("auto", tools, True)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_empty_effort_is_none(client, path):
    wanted = said(client.post(path, json=BODIES[path]))
    assert said(client.post(path, json={**BODIES[path], "reasoning": {"effort": ""}})) == wanted


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_forced_call_needs_tools(client, path):
    reply = client.post(path, json={**BODIES[path], "tools": [], "tool_choice": "required"})
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("tool_choice: ")


@pytest.mark.parametrize(
    "field", [{"n": 2}, {"logprobs": True}, {"response_format": {"type": "json_object"}}]
)
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_what_asks_for_something_is_refused(client, path, field):
    reply = client.post(path, json={**BODIES[path], **field})
    assert reply.status_code in (400, 501) and next(iter(field)) in reply.json()["error"]["message"]


def test_an_option_of_usage_needs_usage(client):
    """`continuous_usage_stats` is an option of `include_usage`, as in vLLM."""
    body = {**BODIES[CHAT], "stream": True, "stream_options": {"continuous_usage_stats": True}}
    lines = client.post(CHAT, json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(chunks) > 1 and not any("usage" in chunk for chunk in chunks)
    reply = client.post(CHAT, json={**BODIES[CHAT], "stream_options": {"include_usage": True}})
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("stream_options: ")


@pytest.mark.parametrize("path", [CHAT, CHAT + "/render", "/tokenize"])
def test_a_message_is_continued_or_answered(client, path):
    """An answer begins behind the final message or inside it; both were asked for, so neither is meant."""
    talk = [*SAID, {"role": "assistant", "content": "Yes"}]
    body = {**BODIES[path], "messages": talk, "continue_final_message": True}
    for fine in ({}, {"add_generation_prompt": None}, {"add_generation_prompt": False}):
        assert client.post(path, json={**body, **fine}).status_code == 200
    reply = client.post(path, json={**body, "add_generation_prompt": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("continue_final_message: expected without")
