"""Numbers that the compiler would change, and the bounds of docs/structured-output.md, at them and beyond."""

import json
import re

import pytest

from grammar_walks import TINY, matcher_of, vocabulary
from qrt.errors import ConfigError
from qrt.grammar.check import Checker
from qrt.grammar.schema import check_schema
from qrt.grammar.spec import Grammar

NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
INEXACT = [
    "9007199254740993", "-9007199254740993", "18446744073709551615", "123456789012345678901234567890",
    "0.1234567890123456789", "12345678901234567.5", "1e400", "[9007199254740993]",
    '{"a": [9007199254740993]}',
]  # fmt: skip
EXACT = ["9007199254740992", "-9007199254740992", "0.1", "1e-7", "1.0", "100", "-0.5", "123456789.123456"]


def schema(keyword, number, kind=""):
    return f'{{{kind}"{keyword}": {f"[{number}]" if keyword == "enum" else number}}}'


@pytest.mark.parametrize(
    "keyword, number",
    [(k, n) for k in NUMBERS for n in INEXACT if n[0] not in "[{" or k in ("const", "enum")],
)
def test_numbers_that_would_change_are_refused(keyword, number):
    for text in (schema(keyword, number), '{"items": {"anyOf": [' + schema(keyword, number) + "]}}"):
        with pytest.raises(ConfigError, match=rf"^x: expected .*\b{keyword}\b"):
            check_schema("x", text)


@pytest.mark.parametrize("number", EXACT)
def test_exact_numbers_are_written_as_they_are(number):
    for keyword in NUMBERS:
        check_schema("x", schema(keyword, number))
    written = b""
    matcher = matcher_of(Grammar("json", schema("const", number)))
    while not matcher.ended:
        (token, *_) = matcher.forced() or [next(iter(vocabulary().ends))]
        if not matcher.accept(token):
            break
        written += vocabulary().library.decode_bytes([token])
    assert json.loads(written) == json.loads(number)


def test_annotations_and_names_hold_any_number():
    for text in (
        '{"default": 9007199254740993, "examples": [1e400]}',
        '{"properties": {"const": {"default": 9007199254740993}}}',
        '{"type": "integer", "maximum": 18446744073709551615, "minimum": 0}',
    ):
        check_schema("x", text)


def test_counts_may_be_written_as_floats():
    matcher = matcher_of(Grammar("json", '{"type": "string", "minLength": 2.0, "maxLength": 2.0}'))
    for token in TINY.encode('"ab"', add_special_tokens=False):
        assert matcher.accepts(token) and matcher.accept(token)
    assert matcher.may_end


def names(count):
    return [f"p{i}" for i in range(count)]


def nested(levels):
    return '{"items": ' * (levels - 1) + "{}" + "}" * (levels - 1)


BOUNDS = {  # what is allowed, what is beyond, and the bound's name
    "levels": (nested(64), nested(65), "64 levels"),
    "enum": (json.dumps({"enum": names(10_000)}), json.dumps({"enum": names(10_001)}), "10,000 values"),
    "optional": (
        json.dumps({"type": "object", "properties": dict.fromkeys(names(1000), {"type": "null"})}),
        json.dumps({"type": "object", "properties": dict.fromkeys(names(1001), {"type": "null"})}),
        "1,000 optional",
    ),
    "required": (
        json.dumps({"properties": dict.fromkeys(names(5000), {}), "required": names(5000)}),
        json.dumps({"properties": dict.fromkeys(names(5001), {}), "required": names(5001)}),
        "5,000 properties",
    ),
}


@pytest.fixture(scope="module")
def checker():
    found = Checker(vocabulary())
    yield found
    found.close()


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_hold(name, checker):
    good, beyond, named = BOUNDS[name]
    checker.check(Grammar("json", good))
    with pytest.raises(ConfigError, match=re.escape(named)):
        checker.check(Grammar("json", beyond))


@pytest.mark.parametrize("count", [200, 1000])
def test_an_object_of_many_optional_properties(count):
    """All of them absent, one of them, two far apart, and in another order than the schema's."""
    own = {
        "type": "object",
        "properties": dict.fromkeys(names(count), {"type": "null"}),
        "additionalProperties": False,
    }
    grammar = Grammar("json", json.dumps(own))
    for text, whole in (
        ("{}", True),
        ('{"p7":null,"p' + str(count - 1) + '":null}', True),
        ('{"p9":null,"p8"', False),
    ):
        matcher = matcher_of(grammar)
        taken = all(matcher.accept(token) for token in TINY.encode(text, add_special_tokens=False))
        assert (taken and matcher.may_end) == whole, matcher.error
