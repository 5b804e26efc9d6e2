"""Schemas that refer to themselves: those without a finite value are refused, and no answer enters them."""

import json

import pytest

from grammar_walks import TINY, matcher_of
from qrt.errors import ConfigError
from qrt.grammar.instances import close_endless
from qrt.grammar.spec import Grammar

ROOT = {"$ref": "#"}
A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


def needs(value, **more):
    return {"type": "object", "properties": {"x": value}, "required": ["x"], **more}


ENDLESS = [
    needs(ROOT),
    needs(ROOT, additionalProperties=False),
    {"type": "array", "items": ROOT, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, ROOT], "minItems": 2},
    {"type": "object", "additionalProperties": ROOT, "required": ["any"]},
    {
        "type": "object",
        "properties": {"x": {"type": "null"}},
        "additionalProperties": ROOT,
        "required": ["x", "y"],
    },
    {**A, "$defs": {"a": needs(B), "b": {"type": "array", "prefixItems": [A], "minItems": 1}}},
    {**A, "$defs": {"a": B, "b": A}},
    {"allOf": [{"required": ["x"]}, {"properties": {"x": ROOT}}, {"type": "object"}]},
    {"allOf": [A, {"type": "object"}], "$defs": {"a": {"properties": {"x": ROOT}, "required": ["x"]}}},
    {"anyOf": [needs(ROOT), {"type": "array", "items": ROOT, "minItems": 2}]},
    {"oneOf": [needs(ROOT), {"type": "array", "items": ROOT, "minItems": 2}]},
    needs({"anyOf": [ROOT, needs(ROOT)]}),
    needs({"type": "array", "items": ROOT, "minItems": 1}),
    {"definitions": {"n": needs({"$ref": "#/definitions/n"})}, "$ref": "#/definitions/n"},
    {**needs({"$ref": "#/properties/x"}), "type": "object"},
    needs({"$ref": "#/$defs/a~1b"}, **{"$defs": {"a/b": ROOT}}),
    {"allOf": [{"type": ["object", "null"]}, {"type": "object"}, needs(ROOT)]},
    {"$ref": "#n", "$defs": {"a": {"$anchor": "n", **needs({"$ref": "#n"})}}},
    {"$id": "http://x/y", "$ref": "y.json", "$defs": {"a": {"$id": "y.json", **needs({"$ref": "y.json"})}}},
    {"$id": "http://x/y", **needs({"$ref": "http://x/y#"})},
    {"$id": "http://x/y", **needs({"$ref": "http://x/y#/$defs/a"}), "$defs": {"a": ROOT}},
    {"$id": "http://x/y", "$ref": "http://x/y#n", "$defs": {"a": {"$anchor": "n", **needs({"$ref": "#n"})}}},
    needs({"$ref": "#/$defs/a%20b%25"}, **{"$defs": {"a b%": ROOT}}),
    {"type": "object", "additionalProperties": ROOT, "minProperties": 1},
    {"type": "object", "properties": {"x": ROOT}, "additionalProperties": False, "minProperties": 1},
    {
        "type": "object",
        "patternProperties": {"^x$": ROOT},
        "required": ["x"],
        "additionalProperties": False,
    },
]
FINITE = {
    "optional": ({"type": "object", "properties": {"x": ROOT}}, "{}"),
    "null": ({"anyOf": [needs(ROOT), {"type": "null"}]}, "null"),
    "null type": ({**needs(ROOT), "type": ["object", "null"]}, "null"),
    "no type": ({"properties": {"x": ROOT}, "required": ["x"]}, "1"),
    "empty array": (needs({"type": "array", "items": ROOT}), '{"x":[]}'),
    "short array": ({"type": "array", "prefixItems": [{"type": "null"}, ROOT], "minItems": 1}, "[null]"),
    "enum": (needs({"anyOf": [{"enum": [1]}, ROOT]}), '{"x":1}'),
    "twice": ({"allOf": [A, A], "$defs": {"a": {"type": "integer"}}}, "1"),
    "numbers": ({"allOf": [{"type": "number"}, {"type": "integer"}, A], "$defs": {"a": {"minimum": 1}}}, "1"),
    "anchor": ({"$ref": "#n", "$defs": {"a": {"$anchor": "n", "const": 1}}}, "1"),
    "least properties": (
        {
            "type": "object",
            "properties": {"x": ROOT, "y": {"type": "null"}},
            "minProperties": 1,
            "additionalProperties": False,
        },
        '{"y":null}',
    ),
    "required is enough": (
        {
            "type": "object",
            "properties": {"x": {"const": 1}},
            "additionalProperties": ROOT,
            "required": ["x"],
            "minProperties": 1,
        },
        '{"x":1}',
    ),
    "one pattern": (
        {
            "type": "object",
            "patternProperties": {"^x$": ROOT},
            "required": ["y"],
            "additionalProperties": {"const": 1},
        },
        '{"y":1}',
    ),
    "not needed": ({"type": "object", "$defs": {"a": needs(A)}}, "{}"),
    "list": (
        {**A, "$defs": {"a": needs({"anyOf": [A, {"type": "null"}]})}},
        '{"x":{"x":null}}',
    ),
}


@pytest.mark.parametrize("schema", ENDLESS, ids=json.dumps)
def test_schemas_without_a_finite_value_are_refused(schema):
    with pytest.raises(
        ConfigError, match="structured_outputs.json: expected a schema that some finite value"
    ):
        matcher_of(Grammar("json", json.dumps(schema)))
    rules = 'start: "a" %json ' + json.dumps(schema)
    with pytest.raises(
        ConfigError, match="structured_outputs.grammar: %json: expected a schema that some finite"
    ):
        matcher_of(Grammar("lark", rules))


@pytest.mark.parametrize("name", FINITE)
def test_schemas_with_a_finite_value_have_it(name):
    schema, value = FINITE[name]
    matcher = matcher_of(Grammar("json", json.dumps(schema)))
    for token in TINY.encode(value, add_special_tokens=False):
        assert matcher.accepts(token) and matcher.accept(token)
    assert matcher.may_end


def test_no_answer_enters_a_part_without_an_end():
    """An optional property, an option, an item: an answer that began them could never be complete."""
    endless = {"$ref": "#/$defs/e"}
    defs = {"$defs": {"e": needs({"$ref": "#/$defs/e"})}}
    parts = [
        {
            "type": "object",
            "properties": {"x": endless, "y": {"type": "null"}},
            "additionalProperties": False,
        },
        {"anyOf": [endless, {"type": "null"}]},
        {"type": "array", "items": endless},
    ]
    for part, left in zip(parts, [{"x": False}, [False], {"items": False}], strict=True):
        schema = {**part, **defs}
        assert close_endless(schema)
        assert left in (
            schema.get("properties", {}) and {"x": schema["properties"]["x"]},
            schema.get("anyOf", [])[:1],
            {"items": schema.get("items")},
        )
    matcher = matcher_of(Grammar("json", json.dumps({**parts[0], **defs})))
    for token in TINY.encode('{"', add_special_tokens=False):
        matcher.accept(token)
    (x,) = TINY.encode("x", add_special_tokens=False)
    assert not matcher.accepts(x)


def test_values_that_nothing_fits_are_refused():
    for schema in (
        False, {"enum": []}, {"anyOf": []}, {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "string", "minLength": 2, "maxLength": 1}, {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "object", "required": ["a"], "properties": {"a": False}}, {"not": {}}, {"type": []},
        {"type": "object", "required": ["a"], "additionalProperties": False}, {"const": 1, "type": "string"},
        {"allOf": [{"type": "string"}, {"type": "null"}]}, {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "minProperties": 2, "maxProperties": 1}, {"type": "integer", "const": 1.5},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="structured_outputs.json: expected"):
            matcher_of(Grammar("json", json.dumps(schema)))
