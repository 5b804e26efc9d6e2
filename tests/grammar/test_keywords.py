"""Keywords that limit nothing: with and without them the same values are valid, as `jsonschema` says."""

import copy
import json

import jsonschema
import pytest

from grammar_walks import TINY, matcher_of
from qrt.errors import ConfigError
from qrt.grammar.keywords import allows_all, drop_redundant, schemas
from qrt.grammar.spec import Grammar

VALUES = [
    None, True, 1, 1.5, "", "a", "ab", [], [1], [1, 1], ["a"], ["a", 1], [[], []], {}, {"a": 1}, {"b": "x"},
    {"a": 1, "b": 2}, {"a": {"b": 1}}, {"": 1},
]  # fmt: skip
TEXT = {"$defs": {"text": {"type": "string"}}}
DRAFT7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
NOTHING = [
    {"propertyNames": {"type": "string"}}, {"propertyNames": {}}, {"propertyNames": True},
    {"propertyNames": {"type": ["string", "null"], "title": "x"}}, {"propertyNames": {"minLength": 0}},
    {"propertyNames": {"pattern": ".*"}}, {"propertyNames": {"anyOf": [{"type": "string"}, False]}},
    {**TEXT, "propertyNames": {"$ref": "#/$defs/text"}}, {"propertyNames": {"minimum": 3, "items": False}},
    {"unevaluatedProperties": True}, {"unevaluatedProperties": {}}, {"unevaluatedItems": True},
    {"unevaluatedProperties": False, "additionalProperties": {"type": "integer"}},
    {"unevaluatedItems": False, "items": {"type": "integer"}},
    {"dependentRequired": {}}, {"dependentRequired": {"a": []}},
    {"dependentRequired": {"a": ["b"]}, "required": ["b"], "type": "object"},
    {"dependentSchemas": {}}, {"dependentSchemas": {"a": {}, "b": True}},
    {**DRAFT7, "dependencies": {"a": [], "b": {}}},
    {"if": {"required": ["a"]}}, {"then": False}, {"else": False},
    {"if": {"type": "string"}, "then": {}, "else": True},
    {"not": False}, {"not": {"not": {}}}, {"not": {"not": True}},
    {"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}, {"minContains": 0}, {"maxContains": 3},
    {"contains": {"type": "string"}, "minContains": 0}, {"contains": True}, {"contains": {}, "type": "array"},
    {"contains": {}, "minContains": 2, "minItems": 1}, {"contains": {}, "maxContains": 1, "maxItems": 3},
    {"contains": {}, "minContains": 0, "maxContains": 1}, {**DRAFT7, "contains": False, "type": "object"},
    {"type": "string", "uniqueItems": True, "contains": {"type": "null"}, "propertyNames": False},
    {"type": ["integer", "array"], "dependentRequired": {"a": ["b"]}}, {"$dynamicAnchor": "x"},
]  # fmt: skip
SOMETHING = [
    {"propertyNames": {"type": "integer"}}, {"propertyNames": {"minLength": 1}}, {"propertyNames": False},
    {"propertyNames": {"enum": ["a"]}}, {"propertyNames": {"pattern": "a"}},
    {"propertyNames": {"oneOf": [{"type": "string"}, {"maxLength": 1}]}},
    {"unevaluatedProperties": False}, {"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": False}},
    {"if": {"type": "string"}, "then": False}, {"not": {"type": "string"}},
    {"not": {"not": {"type": "null"}}},
    {"uniqueItems": True}, {"uniqueItems": True, "maxItems": 2}, {"contains": {"type": "string"}},
    {"contains": {"type": "string"}, "minContains": 0, "maxContains": 1},
    {**DRAFT7, "contains": {"type": "null"}, "minContains": 0},
]  # fmt: skip
LACKING = {
    "propertyNames", "unevaluatedProperties", "unevaluatedItems", "dependentRequired", "dependentSchemas",
    "dependencies", "if", "then", "else", "not", "uniqueItems", "contains", "minContains", "maxContains",
    "$dynamicAnchor",
}  # fmt: skip


def valid(schema):
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return [kind(schema).is_valid(value) for value in VALUES]


@pytest.mark.parametrize("schema", NOTHING, ids=json.dumps)
def test_keywords_that_limit_nothing_go(schema):
    for outer in (
        schema,
        {"type": "object", "properties": {"a": schema}},
        {"anyOf": [schema, {"type": "null"}]},
    ):
        tidy = copy.deepcopy(outer) | {key: schema[key] for key in ("$schema", "$defs") if key in schema}
        before = valid(tidy)
        drop_redundant(tidy)
        assert valid(tidy) == before
        assert not any(LACKING & each.keys() for each in schemas(tidy))
    matcher_of(Grammar("json", json.dumps(schema)))


@pytest.mark.parametrize("schema", SOMETHING, ids=json.dumps)
def test_keywords_that_limit_something_are_refused(schema):
    tidy = copy.deepcopy(schema)
    drop_redundant(tidy)
    assert valid(tidy) == valid(schema) and LACKING & tidy.keys()
    with pytest.raises(ConfigError, match="|".join(LACKING & schema.keys())):
        matcher_of(Grammar("json", json.dumps(schema)))


def test_names_of_properties_and_values_are_no_keywords():
    schema = {
        "properties": {"not": {"type": "null"}, "if": {"const": {"uniqueItems": False}}},
        "enum": [{"not": False}],
    }
    tidy = copy.deepcopy(schema)
    drop_redundant(tidy)
    assert tidy == schema


@pytest.mark.parametrize(
    "schema", [*NOTHING, *SOMETHING, {}, True, False, {"type": "string"}, {"title": "x"}], ids=json.dumps
)
def test_what_allows_all_allows_every_value(schema):
    if allows_all(schema, schema):
        assert all(valid(schema))
    if isinstance(schema, dict) and allows_all(schema, schema, "string"):
        assert all(ok for ok, value in zip(valid(schema), VALUES, strict=True) if isinstance(value, str))


def test_records_take_any_name():
    """What a library for JavaScript writes of a record."""
    schema = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "integer"},
    }
    matcher = matcher_of(Grammar("json", json.dumps(schema)))
    for token in TINY.encode('{"any name":1}', add_special_tokens=False):
        assert matcher.accepts(token) and matcher.accept(token)
    assert matcher.may_end
