"""ToolCall: one call, read from its JSON value."""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import dataclass, field
from typing import Any

ARGUMENT_KEYS = ("arguments", "parameters")
BARE_KEYS = {"name", "id", "type"}  # of a call without arguments; with other keys it is any object


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is the JSON of an object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


def finite(number: str) -> float:
    """Read a number; one beyond a float's range becomes the last float, as JSON has no infinity."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def read_calls(value: Any) -> list[ToolCall]:
    """Return the call of an object, or the calls of a list of objects; ValueError for all else."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("no calls")
    return [_read_call(value) for value in values]


def _read_call(value: Any) -> ToolCall:
    """Read an object with a name and arguments, in any order and with any other keys, or a bare name."""
    if not isinstance(value, dict):
        raise ValueError("no call")
    if not any(key in value for key in ARGUMENT_KEYS) and not BARE_KEYS.issuperset(value):
        raise ValueError("no call")
    given = (value[key] for key in ARGUMENT_KEYS if value.get(key) is not None)
    return named_call(value.get("name"), next(given, None))


def named_call(name: Any, arguments: Any) -> ToolCall:
    """Return a call; ValueError unless the arguments are an object, the JSON of one, or nothing."""
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    if isinstance(arguments, str):
        arguments = json.loads(arguments, parse_float=finite) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are not an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{text}".encode()  # fails for lone surrogates, which no reply can hold
    return ToolCall(name, text)
