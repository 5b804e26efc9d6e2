"""The tokens of log-probabilities, joined, are the text: on every route, whole and streamed."""

import json

import httpx
import pytest
from scripted import script
from servers import ThreadServer, bearer

pytestmark = pytest.mark.model
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CALL = '<tool_call>{"name": "f", "arguments": {"x": "Hi there"}}</tool_call>'
ANSWERS = {
    "plain:": "Hello there, gr\u00fc\u00df \U0001f984 dich.",
    "thinks:": "<think>\nHello, hm.\n</think>\n\nHello there.",
    "calls:": f"Hi. {CALL}",
    "thinks and calls:": f"<think>Hi there</think>\n\nHi there. \n{CALL}\n{CALL}",
    "alone:": CALL,
    "no call:": 'so <tool_call>{"name": "g"}</tool_call> it is',
}
SETTINGS = [{}, {"stop": ["there"]}, {"stop": ["ere"], "include_stop_str_in_output": True}, {"stop": ["e."]}]
CASES = [("plain:", settings) for settings in SETTINGS] + [(asked, {}) for asked in [*ANSWERS][1:]]
CASES += [("thinks:", SETTINGS[1]), ("thinks and calls:", SETTINGS[2])]
TEMPLATE = "{% if tools %}tools {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def client():
    options = {
        "chat_template": TEMPLATE,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "api_keys": (),
    }
    with ThreadServer(kv="fp16", **options) as server:
        script(server.engine, server.tokenizer, dict(sorted(ANSWERS.items(), key=lambda item: -len(item[0]))))
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
            yield client


def events(reply):
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]


def names(entries):
    return [entry["token"] for entry in entries]


def joined(entries):
    """By their texts and by their bytes."""
    text = "".join(entry["token"] for entry in entries)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert all(entry["top_logprobs"] for entry in entries)
    return text


@pytest.mark.parametrize(("asked", "settings"), CASES)
def test_tokens_of_chats_are_the_content(client, asked, settings):
    body = {"messages": [{"role": "user", "content": asked}], "max_tokens": 200, "tools": TOOLS, **settings}
    body |= {"logprobs": True, "top_logprobs": 1}
    choice = client.post(CHAT, json=body).json()["choices"][0]
    content = choice["message"]["content"] or ""
    assert joined(choice["logprobs"]["content"]) == content
    choices = [chunk["choices"][0] for chunk in events(client.post(CHAT, json={**body, "stream": True}))]
    assert "".join(each["delta"].get("content") or "" for each in choices) == content
    entries = [entry for each in choices if each["logprobs"] for entry in each["logprobs"]["content"]]
    assert names(entries) == names(choice["logprobs"]["content"])


@pytest.mark.parametrize(("asked", "settings"), CASES)
def test_tokens_of_responses_are_the_text(client, asked, settings):
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    body = {"input": asked, "max_output_tokens": 200, "tools": tools, "top_logprobs": 1, **settings}
    body["include"] = ["message.output_text.logprobs"]
    told = client.post(RESPONSES, json=body).json()["output"]
    parts = [item["content"][0] for item in told if item["type"] == "message"]
    for part in parts:
        assert joined(part["logprobs"]) == part["text"]
    found = events(client.post(RESPONSES, json={**body, "stream": True}))
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "".join(part["text"] for part in parts)
    entries = [entry for event in deltas for entry in event["logprobs"]]
    assert names(entries) == names(entry for part in parts for entry in part["logprobs"])
    done = [event for event in found if event["type"] == "response.output_text.done"]
    assert [names(event["logprobs"]) for event in done] == [names(part["logprobs"]) for part in parts]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(("asked", "settings"), CASES[:4])
def test_tokens_of_completions_are_the_text(client, asked, settings, echo):
    """Each token has an entry, the end too, and its offset is where its part of the text begins."""
    body = {"prompt": asked, "max_tokens": 200, "logprobs": 1, "echo": echo, **settings}
    reply = client.post(TEXT, json=body).json()
    choice, logprobs = reply["choices"][0], reply["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    places = [len("".join(logprobs["tokens"][:at])) for at in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == places
    usage = reply["usage"]
    count = usage["completion_tokens"] + (usage["prompt_tokens"] if echo else 0)
    assert {len(values) for values in logprobs.values()} == {count}
    choices = [chunk["choices"][0] for chunk in events(client.post(TEXT, json={**body, "stream": True}))]
    assert "".join(each["text"] for each in choices) == choice["text"]
    for name in ("tokens", "text_offset"):
        streamed = [one for each in choices if each["logprobs"] for one in each["logprobs"][name]]
        assert streamed == logprobs[name]


@pytest.mark.parametrize("ids", [{"return_token_ids": True}, {"return_tokens_as_token_ids": True}])
def test_with_token_ids_each_token_has_an_entry(client, ids):
    """Training reads them side by side with the ids."""
    body = {"messages": [{"role": "user", "content": "thinks:"}], "max_tokens": 200, "logprobs": True, **ids}
    reply = client.post(CHAT, json=body).json()
    assert len(reply["choices"][0]["logprobs"]["content"]) == reply["usage"]["completion_tokens"]
