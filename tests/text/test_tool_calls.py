"""Tool calls in every notation, whole and in pieces."""

import ast
import json
import random

import pytest
from split_answers import joined, parse

from qrt.errors import ConfigError
from qrt.serve.routes.protocol import ChatMessage
from qrt.text.chat_template import ChatTemplate
from qrt.text.tool_calls import FORMATS, ToolCallStream, tool_format

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
    ("pythonic", "[get_weather(days=1e999)]", "", 1),
    ("llama3_json", '{"name": "get_weather", "parameters": {"days": -1e999}}', "", 1),
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
            piece, new = joined(stream.feed(rest[:size]))
            pieces, found, rest = pieces + piece, found + new, rest[size:]
            assert whole.startswith(pieces) or not count, "shown text is never taken back"
        piece, new = joined(stream.finish())
        pieces, found = pieces + piece, found + new
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
        shown, new = joined(stream.feed(character))
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
