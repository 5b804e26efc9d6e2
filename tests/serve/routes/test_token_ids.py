"""`return_token_ids` and `return_tokens_as_token_ids`, in bodies and streams: no token is missed."""

import json

import httpx
import pytest
from scripted import script
from servers import ThreadServer, bearer

pytestmark = pytest.mark.model
CALL = 'Köln.<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT = {"messages": [{"role": "user", "content": "calls"}], "tools": TOOLS}


@pytest.fixture(scope="module")
def server():
    with ThreadServer(kv="fp16", chat_template=TEMPLATE, tool_call_parser="hermes") as running:
        script(running.engine, running.tokenizer, {"calls": CALL})
        yield running


@pytest.fixture
def ask(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        yield lambda route, **body: client.post(route, json={"ignore_eos": True, "max_tokens": 80, **body})


def chunks(reply):
    """The chunks of a stream, without its end."""
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(event) for event in events[:-1]]


@pytest.mark.parametrize(
    "route, body", [("/v1/completions", {"prompt": ["calls", "x"]}), ("/v1/chat/completions", CHAT)]
)
def test_all_token_ids_are_returned(server, ask, route, body):
    ids = [*server.tokenizer.encode(CALL, add_special_tokens=False), *server.tokenizer.eos_token_ids]
    prompt = ask(f"{route}/render", **body).json()
    prompts = [each["token_ids"] for each in (prompt if isinstance(prompt, list) else [prompt])]
    whole = ask(route, return_token_ids=True, **body).json()
    assert whole["choices"][0]["token_ids"] == ids
    found = [whole] if "chat" in route else whole["choices"]
    assert [each["prompt_token_ids"] for each in found] == prompts
    streamed: dict[int, list[int]] = {}
    opened = []
    for chunk in chunks(ask(route, return_token_ids=True, stream=True, **body)):
        (choice,) = chunk["choices"]
        streamed.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
        opened += [each["prompt_token_ids"] for each in (chunk, choice) if "prompt_token_ids" in each]
    assert streamed[0] == ids and sorted(opened) == sorted(prompts)
    assert [streamed[each["index"]] for each in whole["choices"]][:1] == [ids]
    plain = ask(route, **body).text + ask(route, stream=True, **body).text
    assert "token_ids" not in plain, "only where they are asked for"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_name_tokens_by_id(ask, stream):
    wanted = {"return_tokens_as_token_ids": True, "return_token_ids": True, "stream": stream, "max_tokens": 3}
    body = {"prompt": "x", "logprobs": 1, "echo": True, **wanted}
    reply = ask("/v1/completions", **body)
    choices = [chunk["choices"][0] for chunk in (chunks(reply) if stream else [reply.json()])]
    tokens = [token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]]
    ids = [
        id for choice in choices for name in ("prompt_token_ids", "token_ids") for id in choice.get(name, [])
    ]
    assert tokens == [f"token_id:{id}" for id in ids]
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, **wanted}
    reply = ask("/v1/chat/completions", **body)
    choices = [chunk["choices"][0] for chunk in (chunks(reply) if stream else [reply.json()])]
    rows = [row for choice in choices if choice["logprobs"] for row in choice["logprobs"]["content"]]
    ids = [id for choice in choices for id in choice.get("token_ids", [])]
    assert [row["token"] for row in rows] == [f"token_id:{id}" for id in ids] and len(ids) == 3
    assert all(row["top_logprobs"][0]["token"].startswith("token_id:") for row in rows)
