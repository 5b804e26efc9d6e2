"""Tool calls through the server, with the openai client."""

import json

import openai
import pytest
from scripted import script
from servers import KEY, ThreadServer

CALL = '{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}'
ARGUMENTS = {"city": "Köln", "days": 2}
ANSWERS = {"hermes": f"<tool_call>\n{CALL}\n</tool_call>", "mistral": f"[TOOL_CALLS][{CALL}]"}
TWICE = {"hermes": f"{ANSWERS['hermes']}\n{ANSWERS['hermes']}", "mistral": f"[TOOL_CALLS][{CALL}, {CALL}]"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def client(request):
    with ThreadServer(kv="fp16", chat_template=TEMPLATE, tool_call_parser=request.param) as server:
        answers = {
            "both": "Let me see. " + ANSWERS[request.param],
            "alone": ANSWERS[request.param],
            "twice": TWICE[request.param],
            "plain": "No tool is needed.",
            "unknown": ANSWERS[request.param].replace("get_weather", "open_door"),
        }
        script(server.engine, server.tokenizer, answers)
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def ask(client, text, **arguments):
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": text}],
        tools=TOOLS,
        extra_body={"ignore_eos": True},
        **arguments,
    )


@pytest.mark.model
def test_through_the_server(client):
    choice = ask(client, "both").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert isinstance(call.function.arguments, str) and json.loads(call.function.arguments) == ARGUMENTS
    choice = ask(client, "alone").choices[0]
    assert choice.message.content is None and len(choice.message.tool_calls) == 1
    choice = ask(client, "plain").choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "No tool is needed.")
    assert choice.message.tool_calls is None
    choice = ask(client, "both", tool_choice="none").choices[0]
    assert choice.message.tool_calls is None and "get_weather" in choice.message.content


@pytest.mark.model
def test_streamed_the_name_comes_once(client):
    content, names, arguments, reasons = "", [], "", []
    for chunk in ask(client, "both", stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
        reasons.append(choice.finish_reason)
    assert content == "Let me see." and names == ["get_weather"]
    assert json.loads(arguments) == ARGUMENTS
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])


@pytest.mark.model
def test_a_call_of_no_tool_of_the_request_is_text(client):
    choice = ask(client, "unknown").choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    chunks = [chunk.choices[0] for chunk in ask(client, "unknown", stream=True)]
    assert chunks[-1].finish_reason == "stop" and not any(chunk.delta.tool_calls for chunk in chunks)
    streamed = "".join(chunk.delta.content or "" for chunk in chunks)
    assert streamed == choice.message.content and "open_door" in streamed


@pytest.mark.model
@pytest.mark.parametrize("parallel, count", [(True, 2), (False, 1)])
def test_calls_one_at_a_time(client, parallel, count):
    choice = ask(client, "twice", parallel_tool_calls=parallel).choices[0]
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == count
    chunks = list(ask(client, "twice", parallel_tool_calls=parallel, stream=True))
    calls = [call.index for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls == list(range(count)) and chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip()


@pytest.mark.model
def test_earlier_calls_reach_the_template_as_mappings(client):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "both"}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    reply = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "tool_calls", "the template has read the argument"


@pytest.mark.model
@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", {"city": "both"}])
def test_a_call_that_was_cut_off_leaves_the_conversation_usable(client, arguments):
    """Clients store what a model has begun to write, and send it with each later turn."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "no JSON"},
        {"role": "user", "content": "both"},
    ]
    reply = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "tool_calls"


@pytest.mark.model
@pytest.mark.parametrize(
    "choice, message",
    [
        ("get_weather", "tool_choice: expected none, auto, required or a function's name, got 'get_weather'"),
        ({"type": "function"}, "tool_choice.function.name: expected a function's name, got None"),
        (
            {"type": "function", "function": {"name": "open_door"}},
            "tool_choice.function.name: expected the name of one of tools, got 'open_door'",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "any"}},
            "tool_choice.allowed_tools.mode: expected",
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": 5}]},
            },
            "tool_choice.allowed_tools.tools.0.function.name: expected a function's name, got 5",
        ),
    ],
)
def test_wrong_choices_are_refused_by_name(client, choice, message):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "plain", tool_choice=choice)
    assert error.value.body["message"].startswith(message)


@pytest.mark.model
def test_a_choice_needs_tools(client):
    with pytest.raises(openai.BadRequestError, match="tool_choice: expected only with tools"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], tool_choice="required"
        )
