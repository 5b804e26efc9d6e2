"""JSON schemas as the compiler takes them: within bounds, without what limits nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from qrt.errors import ConfigError
from qrt.grammar.instances import close_endless
from qrt.grammar.keywords import NAMED, drop_redundant, schemas, types_of
from qrt.request.numbers import is_double

MAX_DEPTH = 64
MAX_PROPERTIES = 5_000
MAX_OPTIONAL = 1_000  # in one object; 5,000 take seconds to compile
MAX_ENUM = 10_000
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/(?:2019-09|2020-12))/schema#?$")
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_LARGEST = 2**63 - 1  # of the compiler's integers; a larger maximum bounds none of them
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")


def check_schema(field: str, text: str) -> None:
    """Raise ConfigError for a schema beyond the bounds: depth, properties, optional ones, enum, numbers."""
    schema = _read(field, text, exact=True)
    if _is_deeper(schema, MAX_DEPTH):
        raise ConfigError(f"{field}: expected at most {MAX_DEPTH} levels, got more; use $ref")
    total = 0
    for each in schemas(schema):
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
        _check_numbers(field, each)
    if total > MAX_PROPERTIES:
        raise ConfigError(f"{field}: expected at most {MAX_PROPERTIES:,} properties, got {total:,}")


def prepared(field: str, text: str, whitespace: str) -> str:
    """Return a schema for the compiler: its options inside, without what limits nothing.

    A format is an annotation in Draft 2020-12: one that the compiler does not know limits nothing. Schemas
    that no finite value fits are false. The result may stand behind `%json` in Lark's rules. ConfigError
    where no value fits.
    """
    schema = _tidy(field, text)
    spaces: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {}
    return json.dumps(schema | {"x-guidance": {"whitespace_flexible": bool(whitespace)} | spaces})


def inner(text: str) -> str:
    """Return a schema that stands in rules behind `%json` as `prepared` does, with options of its own."""
    field = "structured_outputs.grammar: %json"
    check_schema(field, text)
    return json.dumps(_tidy(field, text))


def _tidy(field: str, text: str) -> dict[str, Any]:
    schema = _read(field, text)
    if schema is False:
        raise ConfigError(f"{field}: expected a schema that some value fits, got false")
    schema = {} if schema is True else schema
    for each in schemas(schema):
        _drop_empty(each)
        _name_draft(each)
        if isinstance(each.get("format"), str) and each["format"] not in FORMATS:
            del each["format"]
        for keyword in _COUNTS:
            if isinstance(count := each.get(keyword), float) and count.is_integer():
                each[keyword] = int(count)
    drop_redundant(schema)
    if not close_endless(schema):
        raise ConfigError(
            f"{field}: expected a schema that some finite value fits, got one that needs itself without end; "
            "leave out what requires it"
        )
    tidy: dict[str, Any] = schema
    return tidy


def _name_draft(schema: dict[str, Any]) -> None:
    """Name the draft as the compiler does; a name that is no draft's says nothing of the keywords."""
    given = schema.pop("$schema", None)
    if isinstance(given, str) and (draft := _DRAFT.match(given)):
        schema["$schema"] = f"{'https' if '/' in draft[1] else 'http'}://json-schema.org/{draft[1]}/schema"


def _drop_empty(schema: dict[str, Any]) -> None:
    """Leave out keywords that a program wrote without a value; `const` has null, and `type` may mean it."""
    for keyword, value in [*schema.items()]:
        no_value = value is None and keyword not in ("const", "type")
        if no_value or (keyword in NAMED and value == []) or (keyword == "required" and value == {}):
            del schema[keyword]


def _check_numbers(field: str, schema: dict[str, Any]) -> None:
    """Raise ConfigError for a number that the compiler would change: it has doubles alone."""
    for keyword in ("const", "enum", "multipleOf", *_UPPER, *_LOWER):
        for number in _numbers(schema.get(keyword)):
            if keyword in (*_UPPER, *_LOWER) and not -_LARGEST < number < _LARGEST:
                if keyword in _LOWER or number < 0 or types_of(schema) != {"integer"}:
                    raise ConfigError(
                        f"{field}: expected {keyword} within 2^63, got {number!s:.40}; leave it out"
                    )
            elif not is_double(number):
                raise ConfigError(
                    f"{field}: expected numbers of at most 15 digits in {keyword}, got {number!s:.40}; "
                    "round it, or ask for a text"
                )


def _numbers(value: Any) -> Iterator[int | Decimal]:
    """Yield the numbers in a value, as they are written."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting += [*each.values()] if isinstance(each, dict) else each
        elif isinstance(each, int | Decimal) and not isinstance(each, bool):
            yield each


def _read(field: str, text: str, *, exact: bool = False) -> Any:
    """Return a schema; `exact` keeps the digits of its numbers."""
    try:
        schema = json.loads(text, parse_float=Decimal if exact else None)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{field}: expected a JSON schema, got {text!r:.80} ({error})") from error
    if not isinstance(schema, dict | bool):
        raise ConfigError(f"{field}: expected a JSON schema, an object, got {text!r:.80}")
    return schema


def _is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and objects stand inside each other more than `most` times."""
    level = [value]
    for _ in range(most):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


def _names(given: Any) -> set[str]:
    """Return the names in `properties` or `required`; the compiler refuses what is neither."""
    return {name for name in given if isinstance(name, str)} if isinstance(given, dict | list) else set()
