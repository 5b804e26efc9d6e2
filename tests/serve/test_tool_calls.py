"""Tool calls: every notation, whole and in pieces; through the server with the openai client."""

import ast
import json
import random

import openai
import pytest
from scripted import script
from servers import KEY, ThreadServer

from qrt.errors import ConfigError
from qrt.serve.chat_template import ChatTemplate
from qrt.serve.protocol import ChatMessage
from qrt.serve.tool_calls import FORMATS, ToolCallStream, parse, tool_format

CALL = '{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Köln", "days": 2}}'
OTHER = CALL.replace("get_weather", "open_door")
ARGUMENTS = {"city": "Köln", "days": 2}
ANSWERS = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "llama3_json": LLAMA,
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "pythonic": '[get_weather(city="Köln", days=2)]',
}
TWICE = {"hermes": f"{ANSWERS['hermes']}\n{ANSWERS['hermes']}", "mistral": f"[TOOL_CALLS][{CALL}, {CALL}]"}
CASES = [
    ("hermes", f"I look.\n{ANSWERS['hermes']}\n{ANSWERS['hermes']}", "I look.", 2),
    ("hermes", "no <tool_call> but text, 1 < 2 <tool", "no <tool_call> but text, 1 < 2 <tool", 0),
    ("hermes", "<tool_call>{broken</tool_call> after", "<tool_call>{broken</tool_call> after", 0),
    ("hermes", f"<tool_call>{OTHER}</tool_call>", f"<tool_call>{OTHER}</tool_call>", 0),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', 0),
    ("llama3_json", f"<|python_tag|>{LLAMA}", "", 1),
    ("llama3_json", f"{LLAMA}; {LLAMA}", "", 2),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', 0),
    ("llama3_json", '{"name": "x"', '{"name": "x"', 0),
    ("llama3_json", '{"name": "get_weather", "age": 30}', '{"name": "get_weather", "age": 30}', 0),
    ("llama3_json", OTHER, OTHER, 0),
    ("llama3_json", "{ not json }", "{ not json }", 0),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(ARGUMENTS)}", "", 1),
    ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", "", 2),
    ("mistral", "[TOOL_CALLS] nothing { of the kind", "[TOOL_CALLS] nothing { of the kind", 0),
    ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", f"[TOOL_CALLS][{CALL}, {OTHER}]", 0),
    ("pythonic", '[get_weather(city="Köln", days=2), get_weather(city="Köln", days=2)]', "", 2),
    ("llama3_json", '{"name": "get_weather", "parameters": {"days": NaN}}', None, 0),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "\\ud800"}}', None, 0),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "\\q"}} {"a": 1}', None, 0),
    ("pythonic", "[get_weather(days=1e999)]", None, 0),
    ("pythonic", "[get_weather(days=1)])])]", ")])]", 1),
    ("pythonic", '[get_weather(city="""a"b])""", days=[1, ")]"]), get_weather(city=\'"]\\\'\')] x', "x", 2),
    ("pythonic", "[get_weather(days=1),  # don't )]\n get_weather(city=''   \"\\\\\")]", "", 2),
    ("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list", 0),
    ("pythonic", "[Alice(age=30)]", "[Alice(age=30)]", 0),
    ("pythonic", "[open('/etc/passwd').read()]", "[open('/etc/passwd').read()]", 0),
]


@pytest.mark.parametrize("name, text, shown, count", CASES)
def test_whole_and_in_pieces(name, text, shown, count):
    """Where nothing is said of what is shown, it is all of the text."""
    names = {"get_weather"}
    whole, calls = parse(FORMATS[name], names, text)
    assert whole.strip() == (text if shown is None else shown).strip() and len(calls) == count
    for call in calls:
        assert call.name == "get_weather"
        if "K\u00f6ln" in text:
            assert json.loads(call.arguments) == ARGUMENTS
    for seed in range(30):
        rng, stream = random.Random(seed), ToolCallStream(FORMATS[name], names)
        pieces, found, rest = "", [], text
        while rest:
            size = rng.choice((1, 1, 2, 5, 20))
            piece, new = stream.feed(rest[:size])
            pieces, found, rest = pieces + piece, found + new, rest[size:]
            assert whole.startswith(pieces) or not count, "shown text is never taken back"
        pieces += stream.finish()
        assert pieces == whole
        assert [(c.name, c.arguments) for c in found] == [(c.name, c.arguments) for c in calls]
        assert len({call.id for call in found}) == count


@pytest.mark.parametrize("text", [ANSWERS["mistral"], f"[TOOL_CALLS]get_weather[ARGS]{LLAMA}"])
def test_templates_of_mistral_show_the_call_again(text):
    """They refuse one whose id is not nine letters and digits."""
    template = (
        "{% for message in messages %}{% for call in message.tool_calls %}{% if call.id|length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
        "{% endif %}[TOOL_CALLS]{{ call.function|tojson }}{% endfor %}{% endfor %}"
    )
    (call,) = parse(FORMATS["mistral"], {"get_weather"}, text)[1]
    function = {"name": call.name, "arguments": call.arguments}
    message = {"role": "assistant", "tool_calls": [{"id": call.id, "function": function}]}
    shown = ChatTemplate(template, {}).render([ChatMessage.model_validate(message).for_template()])
    assert shown.startswith("[TOOL_CALLS]") and call.id.isalnum()


def test_arguments_of_every_kind_one_character_at_a_time():
    arguments = {"a": [True, False, None, -1.5e-3], "b": {"c": 'q"\\', "d": "\u00e9\n"}, "e": []}
    text = json.dumps({"name": "f", "parameters": arguments})
    stream, calls = ToolCallStream(FORMATS["llama3_json"], {"f"}), []
    for character in text + " ":
        shown, new = stream.feed(character)
        assert not shown.strip()
        calls += new
    assert [json.loads(call.arguments) for call in calls] == [arguments]


@pytest.mark.parametrize(
    "name, begun, more, end",
    [
        ("pythonic", '[f(x="', ")]", '")]'),
        ("pythonic", "[f(x=[", "(1)],[", "])]"),
        ("pythonic", "[f(x=1)]", ")]", ""),
        ("llama3_json", '{"name": "f", "parameters": {"x": [', "[{}], ", "0]}}"),
        ("llama3_json", '{"name": "\\q"', "}{", ""),
        ("llama3_json", "", "<|python_tag|>{1}", ""),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": ["', "]}", '"]}'),
        ("mistral", "", "[TOOL_CALLS]{", ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "', "</tool", '"}}</tool_call>'),
    ],
)
def test_a_long_call_is_not_parsed_with_every_piece(name, begun, more, end, monkeypatch):
    """Characters that the parsers read, against those that there are."""
    parsed, decode, parse_python = [], json.JSONDecoder.raw_decode, ast.parse

    def counted_decode(decoder, text, start=0):
        value, end = len(text), None
        try:
            value, end = decode(decoder, text, start)
        except json.JSONDecodeError as error:
            parsed.append(min(len(text), error.pos) - start)
            raise
        parsed.append(end - start)
        return value, end

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted_decode)
    monkeypatch.setattr(
        ast,
        "parse",
        lambda text, *more, **named: parsed.append(len(text)) or parse_python(text, *more, **named),
    )
    text = begun + more * (8000 // len(more)) + end
    parse(FORMATS[name], {"f"}, text)
    assert sum(parsed) <= 2 * len(text)
    parsed.clear()
    stream = ToolCallStream(FORMATS[name], {"f"})
    for start in range(0, len(text), 3):
        stream.feed(text[start : start + 3])
    assert sum(parsed) <= 4 * len(text)


def test_the_notation_comes_from_the_template():
    assert tool_format("auto", "... '<tool_call>' ...") is FORMATS["hermes"]
    assert tool_format("auto", "[TOOL_CALLS]") is FORMATS["mistral"]
    assert tool_format("auto", "<|python_tag|>") is FORMATS["llama3_json"]
    assert tool_format("auto", "plain") is tool_format("none", "<tool_call>") is None
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        tool_format("herms", "")


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
    assert content.strip() == "Let me see." and names == ["get_weather"]
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
    call["function"]["arguments"] = "{broken"
    with pytest.raises(openai.BadRequestError, match="arguments of 'f'"):
        client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)


@pytest.mark.model
def test_a_forced_call_is_refused_by_name(client):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        with pytest.raises(openai.InternalServerError, match="tool_choice") as error:
            ask(client, "plain", tool_choice=choice)
        assert error.value.status_code == 501
    with pytest.raises(openai.BadRequestError, match="without tools"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], tool_choice="auto"
        )
