"""JSON schemas against `jsonschema`: what a matcher accepts is valid, and what it writes too."""

import json
import random

import jsonschema
import pytest

from grammar_walks import TINY, accepts, matcher_of, walked
from qrt.errors import ConfigError
from qrt.grammar.parser import source
from qrt.grammar.spec import Grammar
from qrt.request.structured_outputs import StructuredOutputsParams

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -5, "maximum": 5}, "y": {"type": "number"}},
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMAS = {
    "point": POINT,
    "enum": {"enum": ["red", "green", 3, None, {"a": [1]}]},
    "const": {"type": "object", "properties": {"kind": {"const": "circle"}}, "required": ["kind"]},
    "array": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 2},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "null"}],
        "items": False,
        "minItems": 2,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "any of": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "multipleOf": 3}]},
    "all of": {"allOf": [POINT, {"properties": {"y": {"minimum": 0, "maximum": 1}}}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "date": {"type": "string", "format": "date"},
    "unknown format": {"type": "string", "format": "color", "maxLength": 3},
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "types": {"type": ["integer", "null", "boolean"]},
    "one of": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "object"}]},
    "old draft": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"id": {"type": "integer"}},
        "type": "object",
        "properties": {"format": {"$ref": "#/definitions/id"}},
        "required": ["format"],
    },
}
VALUES = [
    None, True, 3, 4, -6, 0.5, "red", "AB-123", "ab", "abcde", "2026-02-30", "2024-02-29", [], [True, None],
    {"x": 1}, {"x": 1, "y": 0.5}, {"x": 1, "y": 2.5}, {"x": 9}, {"x": 1, "z": 1}, {"kind": "circle"},
    {"kind": "square"}, [{"x": 1}], [{"x": 1}, {"x": 2}, {"x": 3}], {"a": 1}, {"a": 1, "b": 2, "c": 3},
    {"a": [1]}, {"value": 1, "children": [{"value": 2}]}, {"value": 1, "children": [{}]}, {"format": 1},
    {"format": "x"}, {},
]  # fmt: skip


def grammar_of(schema, **options):
    return Grammar.of(StructuredOutputsParams(json=schema, **options))


def is_valid(schema, value):
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_accepts_exactly_the_valid(name):
    schema = SCHEMAS[name]
    for indent in (None, 4):
        got = [accepts(grammar_of(schema), json.dumps(value, indent=indent)) for value in VALUES]
        assert got == [is_valid(schema, value) for value in VALUES]
    assert any(got) and not all(got)


@pytest.mark.parametrize("options", [{}, {"disable_any_whitespace": True}], ids=["spaces", "compact"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_walks_end_valid(name, options):
    schema, ended = SCHEMAS[name], 0
    for seed in range(8):
        matcher = matcher_of(grammar_of(schema, **options))
        tokens = walked(matcher, random.Random(seed), 300)
        assert matcher.error is None
        if matcher.may_end:
            text = TINY.decode(tokens, skip_special_tokens=False)
            assert is_valid(schema, json.loads(text)), text
            ended += 1
    assert ended


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"not": {"type": "string"}}, "keyword 'not'"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "keyword 'propertyNames'"),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "keyword 'if', 'then'"),
        ({"oneOf": [{"type": "object"}, {"type": "object", "required": ["a"]}]}, "keyword 'oneOf'"),
        ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems'"),
        ({"$ref": "https://example.com/x"}, "example.com"),
        (False, "got false"),
    ],
)
def test_what_is_not_supported_is_named(schema, words):
    with pytest.raises(ConfigError, match=words):
        matcher_of(grammar_of(schema))


def test_a_schema_cannot_choose_the_compilers_options():
    own = {"type": "array", "x-guidance": {"lenient": True, "whitespace_pattern": " *"}}
    options = json.loads(source(grammar_of(own)))["grammars"][0]["json_schema"]["x-guidance"]
    assert "lenient" not in options and options["whitespace_pattern"] == grammar_of(own).whitespace


def test_a_property_called_format_stays():
    text = source(
        grammar_of({"properties": {"format": {"format": "color", "enum": ["x", {"format": "color"}]}}})
    )
    (inner,) = json.loads(text)["grammars"][0]["json_schema"]["properties"].values()
    assert inner == {"enum": ["x", {"format": "color"}]}


UNSAID = {
    "null": ("required", "enum", "pattern", "minimum", "items", "properties", "additionalProperties", "$ref"),
    "[]": ("properties", "patternProperties", "$defs", "dependentSchemas"),
    "{}": ("required",),
}


@pytest.mark.parametrize("text, keyword", [(text, each) for text, names in UNSAID.items() for each in names])
def test_keywords_that_a_program_wrote_without_a_value(text, keyword):
    """Serializers write null for what is not set, and PHP an empty list for an empty object."""
    inner = {"type": "object", "properties": {"a": {keyword: json.loads(text)}}, "required": ["a"]}
    for value in ({"a": 1}, {"a": "x"}, {"a": {"b": []}}):
        assert accepts(grammar_of(inner), json.dumps(value))
    assert not accepts(grammar_of(inner), "{}")


def test_a_null_that_means_something_stays():
    assert accepts(grammar_of({"const": None}), "null") and not accepts(grammar_of({"const": None}), "1")
    with pytest.raises(ConfigError, match="type must be a string"):
        matcher_of(grammar_of({"type": None}))


@pytest.mark.parametrize(
    "name",
    [
        "https://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft/2020-12/schema#", "https://json-schema.org/schema",
        "http://json-schema.org/schema#", "https://example.com/my.json", "", None,
    ],
)  # fmt: skip
def test_every_name_of_a_draft_is_taken(name):
    """In draft 7 a list of items is a tuple, and so it is read where the draft is not known."""
    schema = {"$schema": name, "type": "array", "items": [{"const": 1}], "minItems": 1, "maxItems": 1}
    assert accepts(grammar_of(schema), "[1]") and not accepts(grammar_of(schema), "[2]")
    wrapped = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    assert accepts(grammar_of(wrapped), '{"a":[1]}')


def test_an_old_draft_stays_old_by_its_other_name():
    """Draft 4 has a boolean exclusiveMinimum."""
    schema = {"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 2}
    grammar = grammar_of({"$schema": "https://json-schema.org/draft-04/schema", **schema})
    assert accepts(grammar, "2") and not accepts(grammar, "1")
