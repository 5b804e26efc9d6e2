"""Reasoning through the server, with the openai client: fields, usage, budgets and what clients ask for."""

import httpx
import openai
import pytest
from scripted import script
from servers import KEY, ThreadServer, bearer, refused

from qrt.request.thinking import Thinking
from qrt.text.reasoning import FORMATS, ReasoningFormat

pytestmark = pytest.mark.model
THOUGHT, ANSWER = "Köln is\n\n so", "It is. <b>"
ANSWERS = {
    "thinks": f"§\n{THOUGHT}\n¶\n\n{ANSWER}",
    "calls": '§It ¶<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "plain": ANSWER,
    "within": f"§\n{THOUGHT}",
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}|{{ m.reasoning_content }}{% endfor %}"
    "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
    "{% if enable_thinking is defined and not enable_thinking %}§¶{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BODY = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    FORMATS["signs"] = ReasoningFormat(("§",), ("¶",))  # tokens of their own for tiny too
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "signs"}
    with ThreadServer(kv="fp16", chat_template=TEMPLATE, **parsers) as server:
        server.thinking = []
        real = server.service.client._send

        def send(message):
            if hasattr(message, "thinking"):
                server.thinking.append(message.thinking)
            real(message)

        server.service.client._send = send
        script(server.engine, server.tokenizer, ANSWERS)
        yield server
    del FORMATS["signs"]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def post(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        yield lambda route="/v1/chat/completions", **body: client.post(route, json={**BODY, **body})


def ask(client, text, *, extra=None, **arguments):
    messages = [{"role": "user", "content": text}]
    extra_body = {**BODY, **(extra or {})}
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=extra_body, **arguments)


def streamed(client, text, **arguments):
    """The fields of all deltas, joined, and the pieces of reasoning."""
    fields, reasons, usage = {"content": "", "reasoning": "", "reasoning_content": ""}, [], None
    pieces = []
    options = {"include_usage": True}
    for chunk in ask(client, text, stream=True, stream_options=options, **arguments):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for name in fields:
                fields[name] += getattr(choice.delta, name, None) or ""
            pieces += [piece] if (piece := getattr(choice.delta, "reasoning", None)) else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return fields, pieces, reasons, usage


def test_message_and_deltas_have_the_same_fields(client, server):
    whole = ask(client, "thinks")
    message = whole.choices[0].message
    assert (message.reasoning_content, message.reasoning, message.content) == (THOUGHT, THOUGHT, ANSWER)
    fields, pieces, reasons, usage = streamed(client, "thinks")
    assert fields == {"content": ANSWER, "reasoning": THOUGHT, "reasoning_content": THOUGHT}
    assert reasons == ["stop"] and len(pieces) > 3
    assert usage.completion_tokens_details == whole.usage.completion_tokens_details
    between = server.tokenizer.encode(f"§\n{THOUGHT}\n", add_special_tokens=False)
    start = server.tokenizer.encode("§", add_special_tokens=False)
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    assert counted == len(between) - len(start)


def test_an_answer_without_thinking_is_as_before(client):
    message = ask(client, "plain").choices[0].message
    assert message.content == ANSWER and "reasoning" not in message.model_dump()
    assert streamed(client, "plain")[0]["content"] == ANSWER
    off = ask(client, "thinks", extra={"enable_thinking": False})
    assert off.choices[0].message.content == ANSWERS["thinks"], "the prompt has ended the thinking"
    assert off.usage.completion_tokens_details is None


def test_calls_come_behind_the_thinking(client):
    choice = ask(client, "calls", tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.reasoning == "It" and choice.message.tool_calls[0].function.name == "f"
    fields, _, reasons, _ = streamed(client, "calls", tools=TOOLS)
    assert fields == {"content": "", "reasoning": "It", "reasoning_content": "It"}
    assert reasons == ["tool_calls"]


def test_a_thinking_that_is_cut_off_has_no_content(client):
    choice = ask(client, "thinks", max_tokens=7).choices[0]
    assert choice.finish_reason == "length" and choice.message.content is None
    assert THOUGHT.startswith(choice.message.reasoning)
    assert ask(client, "within").choices[0].message.reasoning == THOUGHT


def test_clients_choose_how_thinking_is_shown(client):
    for extra in (
        {"include_reasoning": False},
        {"reasoning": {"exclude": True}},
        {"reasoning_format": "hidden"},
    ):
        message = ask(client, "thinks", extra=extra).choices[0].message
        assert message.content == ANSWER and "reasoning" not in message.model_dump()
        assert streamed(client, "thinks", extra=extra)[0]["reasoning"] == ""
    for extra in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        message = ask(client, "thinks", extra=extra).choices[0].message
        assert message.content == ANSWERS["thinks"] and "reasoning" not in message.model_dump()
    fields, pieces, _, _ = streamed(client, "thinks", extra={"stream_reasoning": False})
    assert pieces == [THOUGHT] and fields["content"] == ANSWER
    assert streamed(client, "within", extra={"stream_reasoning": False})[1] == [THOUGHT]


def test_every_peers_field_reaches_the_template(server, post):
    for given, rendered in (
        ({}, "  "),
        ({"enable_thinking": True}, "True True "),
        ({"enable_thinking": False}, "False False §¶"),
        ({"think": True}, "True True "),
        ({"think": "high"}, "True True high"),
        ({"thinking": {"type": "disabled"}}, "False False §¶"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "True True "),
        ({"reasoning": {"effort": "low"}}, "True True low"),
        ({"reasoning": {"enabled": False}}, "False False §¶"),
        ({"reasoning_effort": "none"}, "False False none§¶"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "False False low§¶"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "False True §¶",
        ),
    ):
        body = {"messages": [{"role": "user", "content": "x"}], **given}
        wanted = server.tokenizer.encode(f"user:x|{rendered}", add_special_tokens=False)
        assert post("/tokenize", **body).json()["tokens"] == wanted, given
    reply = post(messages=[{"role": "user", "content": "x"}], think=True, enable_thinking=False)
    assert "enable_thinking and think: expected one value" in refused(reply)


def test_earlier_thinking_reaches_the_template(server, post):
    for name in ("reasoning_content", "reasoning"):
        messages = [{"role": "assistant", "content": "a", name: "b"}, {"role": "user", "content": "x"}]
        wanted = server.tokenizer.encode("assistant:a|buser:x|  ", add_special_tokens=False)
        assert post("/tokenize", messages=messages).json()["tokens"] == wanted


def test_a_budget_reaches_the_engine_in_token_ids(server, post):
    def given(route="/v1/chat/completions", **body):
        server.thinking.clear()
        reply = post(route, max_tokens=20, **body)
        assert reply.status_code == 200, reply.text
        return server.thinking

    start, end, closing = (
        tuple(server.tokenizer.encode(text, add_special_tokens=False)) for text in ("\n§", "\n¶", "\n")
    )
    start, end = start[1:], end[1:]
    closing += end
    chat = {"messages": [{"role": "user", "content": "plain"}]}
    wanted = Thinking(end, start, False, 3, closing)
    for budget in (
        {"thinking_token_budget": 3}, {"thinking_budget": 3}, {"thinking": {"budget_tokens": 3}},
        {"reasoning": {"max_tokens": 3}},
    ):  # fmt: skip
        assert given(**chat, **budget) == [wanted]
    assert given(**chat, thinking_token_budget=3, n=2) == [wanted, wanted]
    assert given(**chat) == given(**chat, thinking_token_budget=-1) == [None]
    assert given(**chat, thinking_token_budget=3, enable_thinking=False) == [None]
    assert given("/v1/completions", prompt="plain", thinking_token_budget=3) == [wanted]
    inside = Thinking(end, start, True, 3, closing)
    assert given("/v1/completions", prompt="plain §\n", thinking_token_budget=3) == [inside]


def test_budgets_that_cannot_be_kept_are_refused(post):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    text = refused(post(**chat, max_tokens=5, thinking_token_budget=5))
    assert text.startswith("thinking_token_budget: expected less than max_tokens 5")
    text = refused(post(**chat, thinking_budget=5, thinking={"budget_tokens": 6}))
    assert text.startswith("thinking_token_budget and thinking.budget_tokens: expected one value")
    assert "thinking_token_budget" in refused(post(**chat, thinking_token_budget=-2))
    with ThreadServer(kv="fp16", chat_template="{{ messages[0].content }}") as other:
        with httpx.Client(base_url=other.url, headers=bearer(), timeout=30) as client:
            body = {**chat, "thinking_token_budget": 5}
            text = refused(client.post("/v1/chat/completions", json=body))
            assert text.startswith("thinking_token_budget: expected none, as the marks of this model's")
