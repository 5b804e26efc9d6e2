"""Keywords of JSON schemas: which stand where, and which of them limit nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# Keywords that hold a schema or a list of them, and those that hold schemas by name.
DIRECT = frozenset(
    (
        "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentSchema", "else",
        "if", "items", "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties",
    )
)  # fmt: skip
NAMED = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)
# Keywords that limit values of one type alone.
BY_TYPE = {
    "object": (
        "additionalProperties", "dependencies", "dependentRequired", "dependentSchemas", "maxProperties",
        "minProperties", "patternProperties", "properties", "propertyNames", "required",
        "unevaluatedProperties",
    ),
    "array": (
        "additionalItems", "contains", "items", "maxContains", "maxItems", "minContains", "minItems",
        "prefixItems", "unevaluatedItems", "uniqueItems",
    ),
    "string": ("format", "maxLength", "minLength", "pattern"),
    "number": ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
}  # fmt: skip
_TYPE_OF = {keyword: kind for kind, keywords in BY_TYPE.items() for keyword in keywords}
_OF_ANY = frozenset(
    ("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "const", "enum", "if", "not", "oneOf", "type")
)
_SAME: dict[str, tuple[Any, ...]] = {  # values that limit nothing
    "minItems": (0,),
    "minLength": (0,),
    "minProperties": (0,),
    "not": (False,),
    "pattern": ("", "^", "$", ".*", "^.*", ".*$", "^.*$"),
    "prefixItems": ([],),
    "required": ([],),
    "uniqueItems": (False,),
}


def schemas(root: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and those inside it, where keywords hold schemas; not what a $ref alone reaches."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        waiting += [holder[key] for holder, key in places_in(schema)]


def places_in(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield what holds each schema right inside a schema, an object or a list, and its key there."""
    for keyword, value in schema.items():
        if keyword in NAMED and isinstance(value, dict):
            yield from ((value, name) for name in value)
        elif keyword in DIRECT and isinstance(value, list):
            yield from ((value, place) for place in range(len(value)))
        elif keyword in DIRECT:
            yield schema, keyword


def types_of(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the types that `type` names; None without it."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    return {kind for kind in given if isinstance(kind, str)} if isinstance(given, list) else None


def target(root: Any, reference: Any, named: Mapping[str, Any] | None = None) -> Any:
    """Return what a reference within the schema means, "#/$defs/name"; None for others.

    named   the schemas by their own names, from `names_in`: references may have those too
    """
    if not isinstance(reference, str):
        return None
    base, _, fragment = reference.partition("#")
    start = root if base == "" else (named or {}).get(base)
    if fragment and not fragment.startswith("/"):
        return (named or {}).get(f"{base}#{fragment}")
    return _at_pointer(start, unquote(fragment))


def _at_pointer(start: Any, pointer: str) -> Any:
    found = start
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict) and part in found:
            found = found[part]
        else:
            return None
    return found


def names_in(root: Any) -> dict[str, Any]:
    """Return the schemas that have names of their own, by the references to them: `$id` and `$anchor`."""
    found: dict[str, Any] = {}
    own = str(root.get("$id") or "").partition("#")[0] if isinstance(root, dict) else ""
    for schema in schemas(root):
        for keyword in ("$id", "id"):
            if isinstance(name := schema.get(keyword), str) and name:
                found.setdefault(name.removesuffix("#"), schema)
        if isinstance(anchor := schema.get("$anchor"), str):
            found |= {f"{base}#{anchor}": schema for base in {"", own}}
    return found


def drop_redundant(root: Any) -> None:
    """Leave out, in place, keywords that the compiler lacks and that allow everything where they stand.

    `contains` of a schema that allows everything counts the items: it becomes minItems and maxItems.
    """
    text = [*schemas(root)]
    dynamic = any("$dynamicRef" in each or "$recursiveRef" in each for each in text)
    for schema in text:
        _count_items(schema, root)
        for keyword in sorted({*_IDLE, "$dynamicAnchor", "$recursiveAnchor"} & schema.keys()):
            if keyword in ("$dynamicAnchor", "$recursiveAnchor"):
                redundant = not dynamic
            else:
                redundant = _allows(keyword, schema, root)
            if redundant:
                del schema[keyword]


def _count_items(schema: dict[str, Any], root: Any) -> None:
    """Write `contains` as bounds of the number of items, if any item counts for it."""
    if "contains" not in schema or not allows_all(schema["contains"], root) or _old(root):
        return
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    bounds = [
        bound for bound in (least, most, schema.get("minItems"), schema.get("maxItems")) if bound is not None
    ]
    if not all(isinstance(bound, int) for bound in bounds):
        return
    schema["minItems"] = max(least, schema.get("minItems", 0))
    if most is not None:
        schema["maxItems"] = min(most, schema.get("maxItems", most))
    for keyword in ("contains", "minContains", "maxContains"):
        schema.pop(keyword, None)


def _allows(keyword: str, schema: Mapping[str, Any], root: Any) -> bool:
    """Return whether a keyword limits no value beyond what the rest of its schema allows."""
    types, kind = types_of(schema), _TYPE_OF.get(keyword)
    if kind is not None and types is not None and kind not in types:
        return True
    return keyword in _IDLE and _IDLE[keyword](schema[keyword], schema, root)


def _repeats_nothing(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    most = schema.get("maxItems")
    return value is False or (isinstance(most, int) and most <= 1)


def _excludes_nothing(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    doubled = isinstance(value, dict) and [*value] == ["not"]
    return value is False or (doubled and allows_all(value["not"], root))


def _decides_nothing(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    return all(allows_all(schema.get(branch, True), root) for branch in ("then", "else"))


def _follows_nothing(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    return "if" not in schema or allows_all(value, root)


def _contains_nothing(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    return schema.get("minContains") == 0 and "maxContains" not in schema and not _old(root)


def _counts_nothing(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    return "contains" not in schema  # which went before, if it could


def _names_anything(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    return allows_all(value, root, "string")


def _leaves_no_properties(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    return allows_all(value, root) or "additionalProperties" in schema


def _leaves_no_items(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    return allows_all(value, root) or isinstance(schema.get("items"), dict | bool)


def _depends_on_nothing(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    """Return whether all that properties call for is there anyway."""
    required = schema.get("required")
    there = set(required) if isinstance(required, list) else set()
    return isinstance(value, dict) and all(
        there.issuperset(needed) if isinstance(needed, list) else allows_all(needed, root)
        for needed in value.values()
    )


def allows_all(schema: Any, root: Any, kind: str | None = None, depth: int = 0) -> bool:
    """Return whether a schema surely allows every value, or every one of a type."""
    if not isinstance(schema, dict) or depth > 8:
        return schema is True
    if kind is not None and kind not in (types_of(schema) or {kind}):
        return False
    return all(_limits_nothing(keyword, value, root, kind, depth) for keyword, value in schema.items())


def _limits_nothing(keyword: str, value: Any, root: Any, kind: str | None, depth: int) -> bool:
    own = _TYPE_OF.get(keyword)
    if own is None and keyword not in _OF_ANY:
        return True  # an annotation
    if own is not None and kind not in (None, own):
        return True
    if keyword in _SAME:
        return any(value == each and type(value) is type(each) for each in _SAME[keyword])
    if keyword in ("allOf", "anyOf", "oneOf") and isinstance(value, list) and value:
        found = [allows_all(each, root, kind, depth + 1) for each in value]
        return any(found) if keyword == "anyOf" else all(found) and (keyword == "allOf" or len(found) == 1)
    if keyword in ("properties", "patternProperties"):
        return isinstance(value, dict) and all(allows_all(v, root, None, depth + 1) for v in value.values())
    if keyword == "$ref":
        return allows_all(target(root, value), root, kind, depth + 1)
    if keyword in DIRECT - {"not", "contains", "if", "prefixItems"}:
        return allows_all(value, root, "string" if keyword == "propertyNames" else None, depth + 1)
    return keyword == "type" and kind is not None


def _old(root: Any) -> bool:
    """Return whether a schema is of a draft before 2019-09, which counts no contained items."""
    return isinstance(root, dict) and "json-schema.org/draft-0" in str(root.get("$schema"))


# When a keyword that the compiler lacks is idle: by its value, its schema and the whole schema.
_IDLE: dict[str, Callable[[Any, Mapping[str, Any], Any], bool]] = {
    "contains": _contains_nothing,
    "dependencies": _depends_on_nothing,
    "dependentRequired": _depends_on_nothing,
    "dependentSchemas": _depends_on_nothing,
    "else": _follows_nothing,
    "if": _decides_nothing,
    "maxContains": _counts_nothing,
    "minContains": _counts_nothing,
    "not": _excludes_nothing,
    "propertyNames": _names_anything,
    "then": _follows_nothing,
    "unevaluatedItems": _leaves_no_items,
    "unevaluatedProperties": _leaves_no_properties,
    "uniqueItems": _repeats_nothing,
}
