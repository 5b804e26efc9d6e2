"""Grammars of tool calls: what they allow is read back as calls, in every notation."""

import json
import random

import jsonschema
import pytest

from grammar_walks import TINY, WIDTH, accepts, allowed, matcher_of
from qrt.errors import ConfigError, UnsupportedError
from qrt.grammar.spec import Grammar
from qrt.request.structured_outputs import StructuredOutputsParams
from qrt.text.answer import AnswerFormat, ContentText
from qrt.text.tool_calls import FORMATS, LISTED, Callee, Calls, ToolCall, calls_grammar

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "at"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "near": {"type": ["boolean", "null"]}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
WORDS = {"properties": {"words": {"type": "array", "items": {"type": "string"}, "maxItems": 3}}}
SCHEMAS = {"get_weather": WEATHER, "now": None, "say": {**WORDS, "additionalProperties": False}}
SPECIAL = {name: TINY.hf.convert_tokens_to_ids(name) for name in TINY.hf.all_special_tokens}
NAMES = [*FORMATS, "listed"]
CLOSING = {token for token in range(WIDTH) if not TINY.token_text(token).strip('"}])\n')}


def format_of(name):
    return LISTED if name == "listed" else FORMATS[name]


def functions(exact=True):
    return [
        Callee.of(f"tools.{number}.function", name, schema, exact=exact)
        for number, (name, schema) in enumerate(SCHEMAS.items())
    ]


def grammar_of(name, calls, special=SPECIAL):
    return Grammar.of(StructuredOutputsParams(grammar=calls_grammar(format_of(name), calls, special)))


def walk(grammar, seed, most=120):
    """A random answer: marks that close something come more often, at last alone; None: cut off."""
    rng, matcher, tokens = random.Random(seed), matcher_of(grammar), []
    while not matcher.ended and len(tokens) < 3 * most:
        free = allowed(matcher) - set(TINY.eos_token_ids)
        if not free or (matcher.may_end and rng.random() < (0.3 if len(tokens) < most else 1)):
            break
        near = sorted(free & CLOSING)
        token = rng.choice(near if near and (rng.random() < 0.4 or len(tokens) > most) else sorted(free))
        assert matcher.accept(token), matcher.error
        tokens.append(token)
    return TINY.decode(tokens, skip_special_tokens=False) if matcher.may_end else None


def read(name, text):
    """The texts and calls of an answer, whole and one character at a time."""
    format = AnswerFormat(format_of(name), frozenset(SCHEMAS))
    parts, stream = format.split(text), format.stream()
    pieces = [part for character in text for part in stream.feed(character)] + stream.finish()
    assert [p.name for p in parts if isinstance(p, ToolCall)] == [
        p.name for p in pieces if isinstance(p, ToolCall)
    ]
    return [p.text for p in parts if isinstance(p, ContentText)], [
        p for p in parts if isinstance(p, ToolCall)
    ]


def check(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name] or {"maxProperties": 0})


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_forced_calls_are_read_back(name, parallel):
    grammar, counts = grammar_of(name, Calls(functions(), parallel=parallel)), set()
    answers = [text for seed in range(12) if (text := walk(grammar, seed))]
    assert len(answers) > 8
    for text in answers:
        texts, calls = read(name, text)
        assert calls and not "".join(texts).strip(), text
        check(calls)
        counts.add(len(calls))
    assert counts == {1} if not parallel else max(counts) > 1


@pytest.mark.parametrize("name", FORMATS)
def test_auto_with_strict_tools(name):
    """Text, and calls wherever the parser looks for them: none is left to the model."""
    answers = [walk(grammar_of(name, Calls(functions(), forced=False)), seed) for seed in range(8)]
    found = [read(name, text) for text in answers if text is not None]
    for _, calls in found:
        check(calls)
    matcher = matcher_of(grammar_of(name, Calls(functions(), forced=False)))
    free, whole = allowed(matcher), {t for t in range(WIDTH) if "\ufffd" not in TINY.token_text(t)}
    assert set(TINY.eos_token_ids) <= free and not free & set(SPECIAL.values()) - set(TINY.eos_token_ids)
    begun = whole - set(SPECIAL.values()) - free
    assert all(TINY.token_text(t).strip()[:1] == format_of(name).opening for t in begun), "of texts all else"


MARKED = {
    "hermes": ("I look.", "<tool_call>", '\n{"name": "'),
    "llama3_json": ("I look.", "<|python_tag|>", '{"name": "'),
    "mistral": ("I look.", "[TOOL_CALLS]", '[{"name": "'),
    "pythonic": ("", "[", ""),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_text_is_a_call_of_the_tools(name):
    """Behind the mark of a call only the request's functions may follow, however the mark is written."""
    before, mark, behind = MARKED[name]
    for text in (before, ""):
        for calls in (Calls(functions(), forced=False), Calls(functions(), forced=False, parallel=False)):
            matcher = matcher_of(grammar_of(name, calls))
            spelled = [token for character in text + mark for token in TINY.encode(character, False)]
            for token in (*spelled, *TINY.encode(behind, False)):
                assert token in allowed(matcher) and matcher.accept(token)
            begin = {TINY.decode([token]).strip()[:1] for token in allowed(matcher)}
            assert begin == {"g", "n", "s"}, "the first letters of the functions"


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json"])
def test_marks_that_are_special_tokens(name):
    mark = FORMATS[name].marker
    special = {**SPECIAL, mark: SPECIAL["<|system|>"]}
    forced = matcher_of(grammar_of(name, Calls(functions()), special))
    if name == "llama3_json":
        assert special[mark] not in allowed(forced), "its calls begin an answer by themselves"
    else:
        assert allowed(forced) == {special[mark]}
    free = matcher_of(grammar_of(name, Calls(functions(), forced=False), special))
    for token in (*TINY.encode("I look.", False), special[mark]):
        assert free.accept(token), free.error
    begin = {TINY.decode([token]).strip()[:1] for token in allowed(free)} - {""}
    assert begin == ({"["} if name == "mistral" else {"{"} if name == "llama3_json" else set())


def test_only_marks_are_special_tokens():
    """Those of the closing tag too; a function's name and schema are text."""
    special = {"</tool_call>": 7, "f": 8, "x": 9}
    function = Callee.of("tools.0.function", "f", {"properties": {"x": {"const": "f"}}}, exact=True)
    rules = calls_grammar(FORMATS["hermes"], Calls([function]), special)
    assert "<[7]>" in rules and "</tool_call>" not in rules and "<[8]>" not in rules and "<[9]>" not in rules


@pytest.mark.parametrize("name", NAMES)
def test_tools_that_declare_no_arguments_get_none(name):
    """However a request says so; each is called once, as a second call says nothing new."""
    bare = (
        None,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"properties": {}, "required": []},
        {"type": None, "properties": [], "required": None},
    )
    for parameters in (
        *bare,
        {"type": "object", "properties": {}, "additionalProperties": False, "title": "x"},
    ):
        function = Callee.of("tools.0.function", "now", parameters, exact=True)
        text = walk(grammar_of(name, Calls([function])), 0)
        assert [(call.name, call.arguments) for call in read(name, text)[1]] == [("now", "{}")]
    free = Callee.of("tools.0.function", "now", {"additionalProperties": True}, exact=True)
    assert free.schema["additionalProperties"] is True and not free.bare


def test_mistrals_newer_tokenizers_write_no_list():
    special = {**SPECIAL, "[TOOL_CALLS]": SPECIAL["<|system|>"], "[ARGS]": SPECIAL["<|user|>"]}
    for parallel in (True, False):
        grammar = grammar_of("mistral", Calls(functions(), parallel=parallel), special)
        texts = [walk(grammar, seed) for seed in range(8)]
        for text in filter(None, texts):
            text = text.replace("<|system|>", "[TOOL_CALLS]").replace("<|user|>", "[ARGS]")
            shown, calls = read("mistral", text)
            assert calls and not shown and text.count("[ARGS]") == len(calls)
            check(calls)


SHAPES = {
    "json": ({"json": WEATHER}, '{"city": "x", "at": {"x": 1}}', '{"city": "x", "at": 1}'),
    "json_object": ({"json_object": True}, '{"a": []}', "[]"),
    "regex": ({"regex": r"a/b\/c|d\ne"}, "a/b/c", "ab/c"),
    "choice": ({"choice": ["yes", 'n"o']}, 'n"o', "no"),
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_in_a_shape_or_calls(name, kind):
    fields, right, wrong = SHAPES[kind]
    calls = Calls(functions(), forced=False, answer=StructuredOutputsParams(**fields))
    grammar = grammar_of(name, calls)
    assert accepts(grammar, right) and not accepts(grammar, wrong)
    forced = grammar_of(name, Calls(functions()))
    call = next(text for seed in range(20) if (text := walk(forced, seed))).strip()
    assert accepts(grammar, call) and not accepts(grammar, call + " x")


def test_what_no_grammar_can_be_made_of():
    def refused(name, error, *functions, **more):
        with pytest.raises(error) as got:
            calls_grammar(FORMATS[name], Calls(functions, **more), SPECIAL)
        return str(got.value)

    free = StructuredOutputsParams(grammar="start: /a/")
    message = refused("hermes", ConfigError, *functions(), forced=False, answer=free)
    assert message.startswith("structured_outputs.grammar: expected no tools")
    for name, properties in (
        ("look-up", {}),
        ("f", {"x-y": {}}),
        ("f", {"class": {}}),
        ("f", {"k\u00f6": {}}),
    ):
        function = Callee.of("tools.3.function", name, {"properties": properties}, exact=True)
        assert refused("pythonic", ConfigError, function).startswith("tools.3.function: expected names that")
    function = Callee.of("tools.0.function", "f", {"anyOf": [{}]}, exact=True)
    assert "tools.0.function.parameters.anyOf" in refused("pythonic", UnsupportedError, function)
    with pytest.raises(ConfigError, match="tools.0.function.parameters.type: expected object, got 'string'"):
        Callee.of("tools.0.function", "f", {"type": "string"}, exact=True)
    with pytest.raises(ConfigError, match="tools.0.function.parameters: expected at most 64 levels"):
        deep = {}
        for _ in range(70):
            deep = {"not": deep}
        Callee.of("tools.0.function", "f", deep, exact=True)
