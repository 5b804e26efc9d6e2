"""JSON schemas as the compiler takes them: within bounds, without formats that it does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from qrt.errors import ConfigError

MAX_DEPTH = 64
MAX_PROPERTIES = 5_000
MAX_OPTIONAL = 1_000  # in one object; 5,000 take seconds to compile
MAX_ENUM = 10_000
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# Keywords that hold a schema or a list of them, and those that hold schemas by name.
_DIRECT = frozenset(
    (
        "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentSchema", "else",
        "if", "items", "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties",
    )
)  # fmt: skip
_NAMED = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))


def check_schema(field: str, text: str) -> None:
    """Raise ConfigError for a schema beyond the bounds: depth, properties, optional ones, enum."""
    schema = _read(field, text)
    if _is_deeper(schema, MAX_DEPTH):
        raise ConfigError(f"{field}: expected at most {MAX_DEPTH} levels, got more; use $ref")
    total = 0
    for each in _schemas(schema):
        named = _names(each.get("properties")) | _names(each.get("required"))
        total += len(named)
        optional = len(named - _names(each.get("required")))
        if optional > MAX_OPTIONAL:
            raise ConfigError(
                f"{field}: expected at most {MAX_OPTIONAL:,} optional properties in an object, got "
                f"{optional:,}; require some"
            )
        enum = each.get("enum")
        if isinstance(enum, list) and len(enum) > MAX_ENUM:
            raise ConfigError(f"{field}: expected at most {MAX_ENUM:,} values in enum, got {len(enum):,}")
    if total > MAX_PROPERTIES:
        raise ConfigError(f"{field}: expected at most {MAX_PROPERTIES:,} properties, got {total:,}")


def prepared(field: str, text: str, whitespace: str) -> str:
    """Return a schema for the compiler: its options inside, unknown formats left out.

    A format is an annotation in Draft 2020-12: one that the compiler does not know limits nothing. The result
    may stand behind `%json` in Lark's rules.
    """
    schema = _read(field, text)
    if schema is False:
        raise ConfigError(f"{field}: expected a schema that some value fits, got false")
    schema = {} if schema is True else schema
    for each in _schemas(schema):
        if isinstance(each.get("format"), str) and each["format"] not in FORMATS:
            del each["format"]
    spaces: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {}
    return json.dumps(schema | {"x-guidance": {"whitespace_flexible": bool(whitespace)} | spaces})


def _read(field: str, text: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{field}: expected a JSON schema, got {text!r:.80} ({error})") from error
    if not isinstance(schema, dict | bool):
        raise ConfigError(f"{field}: expected a JSON schema, an object, got {text!r:.80}")
    return schema


def _schemas(root: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and those inside it, where keywords hold schemas; not what a $ref alone reaches."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        for keyword, value in schema.items():
            if keyword in _NAMED and isinstance(value, dict):
                waiting += value.values()
            elif keyword in _DIRECT:
                waiting += value if isinstance(value, list) else [value]


def _is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and objects stand inside each other more than `most` times."""
    level = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


def _names(given: Any) -> set[str]:
    """Return the names in `properties` or `required`; the compiler refuses what is neither."""
    return {name for name in given if isinstance(name, str)} if isinstance(given, dict | list) else set()
