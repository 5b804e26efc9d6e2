"""/v1/responses with the real `openai` client, on written answers."""

import json

import httpx
import openai
import pytest
from pydantic import BaseModel
from scripted import script
from servers import KEY, ThreadServer, bearer, refused

pytestmark = pytest.mark.model
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ANSWERS = {
    "asks": "Let me see. " + CALL,
    "twice": CALL + "\n" + CALL,
    "json": '{"city": "Köln"}',
    "plain": "It rains.",
    "ponder": "<think>\nHm.\n</think>\n\nIt rains.",
}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ALWAYS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with ThreadServer(
        kv="fp16", chat_template=TEMPLATE, tool_call_parser="hermes", reasoning_parser="qwen3"
    ) as running:
        script(running.engine, running.tokenizer, ANSWERS)
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def raw(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
        yield client


def test_text(client):
    reply = client.responses.create(model="tiny", input="plain", extra_body=ALWAYS)
    assert reply.output_text == "It rains." and reply.status == "completed" and reply.error is None
    (item,) = reply.output
    assert item.type == "message" and item.status == "completed" and reply.object == "response"
    usage = reply.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens > 2
    assert reply.model == "tiny" and reply.tools == [] and reply.text.format.type == "text"


def test_tools_in_a_loop(client):
    """The output goes back as input, as the documents of OpenAI do it."""
    turn = [{"role": "user", "content": "asks"}]
    reply = client.responses.create(model="tiny", input=turn, tools=[TOOL], extra_body=ALWAYS)
    message, call = reply.output
    assert message.content[0].text == "Let me see." and call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Köln"} and call.name == "get_weather"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "plain"}
    turn = [{"role": "user", "content": "x"}, *reply.output, result]
    again = client.responses.create(model="tiny", input=turn, tools=[TOOL], extra_body=ALWAYS)
    assert again.output_text == "It rains."


@pytest.mark.parametrize("parallel, count", [(True, 2), (False, 1)])
def test_calls_one_at_a_time(client, parallel, count):
    ask = {"model": "tiny", "input": "twice", "tools": [TOOL], "parallel_tool_calls": parallel}
    reply = client.responses.create(**ask, extra_body=ALWAYS)
    assert [item.type for item in reply.output] == ["function_call"] * count
    assert reply.parallel_tool_calls == parallel


REASONED = """created in_progress output_item.added content_part.added reasoning_text.delta
        reasoning_text.done content_part.done output_item.done """
EVENTS = {
    "plain": """created in_progress output_item.added content_part.added output_text.delta output_text.done
        content_part.done output_item.done completed""",
    "asks": """created in_progress output_item.added content_part.added output_text.delta output_text.done
        content_part.done output_item.done output_item.added function_call_arguments.delta
        function_call_arguments.done output_item.done completed""",
}


EVENTS["ponder"] = REASONED + EVENTS["plain"].removeprefix("created in_progress ")


def test_reasoning_is_an_item(client):
    reply = client.responses.create(model="tiny", input="ponder", extra_body=ALWAYS)
    reasoning, message = reply.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "Hm.", [])
    assert message.content[0].text == "It rains."
    assert 0 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens


@pytest.mark.parametrize("text", EVENTS)
def test_events_come_in_openais_order(client, text):
    ask = {"model": "tiny", "input": text, "tools": [TOOL], "extra_body": ALWAYS}
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    assert once == EVENTS[text].split()
    whole, streamed = client.responses.create(**ask), events[-1].response
    assert (
        streamed.output_text == whole.output_text and streamed.usage.total_tokens == whole.usage.total_tokens
    )
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    assert streamed.usage.output_tokens_details == whole.usage.output_tokens_details
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text


def test_the_clients_own_stream_and_parser(client):
    class City(BaseModel):
        city: str

    with client.responses.stream(model="tiny", input="json", text_format=City, extra_body=ALWAYS) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == City(city="Köln")
    reply = client.responses.parse(model="tiny", input="json", text_format=City, extra_body=ALWAYS)
    assert reply.output_parsed == City(city="Köln")


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_answer_is_incomplete(client, stream):
    reply = client.responses.create(model="tiny", input="plain", max_output_tokens=1, stream=stream)
    if stream:
        *_, last = reply
        assert last.type == "response.incomplete"
        reply = last.response
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage.output_tokens == 1 and reply.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client, stream):
    ask = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": ALWAYS}
    reply = client.responses.create(model="tiny", input="x", max_output_tokens=5, stream=stream, **ask)
    if stream:
        *_, last = reply
        reply = last.response
    (part,) = reply.output[0].content
    assert len(part.logprobs) == reply.usage.output_tokens == 5
    assert all(len(row.top_logprobs) == 2 and row.logprob <= 0 for row in part.logprobs)


def test_items_become_the_messages_of_a_chat(server, client):
    """One turn of an assistant is one message, whatever items it is made of."""
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "R"}],
    }
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"city": "Rom"}'}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]}
    items = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "input_text", "text": "U"}]},
        reasoning, said, call, {**call, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "O"}]},
        {"type": "function_call_output", "call_id": "d", "output": "P"},
        reasoning, said, said,
        {"role": "user", "content": "plain"},
    ]  # fmt: skip
    prompts, real = [], server.service.tokenizer.encode
    server.service.tokenizer.encode = lambda text, *more, **named: (
        prompts.append(text) or real(text, *more, **named)
    )
    try:
        client.responses.create(model="tiny", instructions="I", input=items, extra_body=ALWAYS)
    finally:
        server.service.tokenizer.encode = real
    assert prompts[:1] == [
        "<system>I<system>D<user>U<assistant>A(R)[f Rom][f Rom]<tool>O<tool>P<assistant>A(R)<assistant>A"
        "<user>plain<assistant>"
    ]


@pytest.mark.parametrize(
    "field, code, name",
    [
        ({"previous_response_id": "resp_1"}, 501, "previous_response_id"),
        ({"background": True}, 501, "background"),
        ({"truncation": "auto"}, 501, "truncation"),
        ({"tools": [{"type": "web_search"}]}, 501, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.name"),
        ({"tool_choice": {"type": "file_search"}, "tools": [TOOL]}, 501, "tool_choice.type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 501, "input.0"),
        ({"input": [{"type": "computer_call"}]}, 501, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 501, "input.0.content.0.type"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input.0.role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input.0.arguments"),
        ({"input": []}, 400, "input"),
        ({"max_output_tokens": 10**6}, 400, "max_output_tokens"),
        ({"max_tokens": 5}, 501, "max_tokens"),
        ({"n": 2}, 501, "n"),
        ({"seed": "x"}, 400, "seed"),
        ({"text": {"verbosity": "low"}}, 501, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format.schema"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"mirostat": 1}, 501, "mirostat"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_run_is_refused_by_name(raw, field, code, name):
    message = refused(raw.post("/v1/responses", json={"input": "x", **field}), code)
    assert message.startswith(f"{name}:"), message


def test_fields_that_change_nothing_are_accepted(client):
    reply = client.responses.create(
        model="tiny", input="plain", store=True, metadata={"a": "b"}, user="me", truncation="disabled",
        include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"},
        service_tier="auto", prompt_cache_key="k", extra_body={**ALWAYS, "seed": 3, "top_k": 5},
    )  # fmt: skip
    assert reply.output_text == "It rains." and reply.metadata == {"a": "b"} and reply.store is False


@pytest.mark.parametrize(
    "route, field",
    [
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 4097}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]}),
        ("/v1/responses", {"tools": [TOOL] * 129}),
        ("/v1/responses", {"include": ["x"] * 65}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}] * 4097}),
        ("/v1/messages", {"system": [{"type": "text", "text": ""}] * 4097}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}}] * 129}),
        ("/v1/messages/count_tokens", {"tools": [{"name": "f", "input_schema": {}}] * 129}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_lists_are_capped(raw, route, field):
    whole = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    body = {"input": "x"} if route == "/v1/responses" else whole
    reply = raw.post(route, json={**body, **field})
    assert reply.status_code == 400 and len(reply.content) < 3000 and next(iter(field)) in reply.text
