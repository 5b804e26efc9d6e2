"""Numbers of a request that a double does not hold as they are written."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

MOST_DIGITS = 17  # with which some programs write every double


class WrittenFloat(float):
    """A float that remembers how it was written, as that is another number.

    text   the number in JSON
    """

    text: str


def is_double(number: int | Decimal) -> bool:
    """Return whether a double has this value when it is written again, or is written so in 17 digits."""
    try:
        value = float(number)
    except OverflowError:
        return False
    if Decimal(repr(value)) == number:
        return True
    digits = len(number.as_tuple().digits) if isinstance(number, Decimal) else math.inf
    return digits <= MOST_DIGITS and Decimal(f"{value:.{digits}g}") == number


def read_float(text: str) -> float:
    """Return the double of JSON's text, a WrittenFloat where that is another number; ValueError beyond it."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number {text:.40} is out of range")
    if (len(text) <= MOST_DIGITS and "e" not in text.lower()) or is_double(Decimal(text)):
        return value
    written = WrittenFloat(value)
    written.text = text
    return written


def json_text(value: Any) -> str:
    """Return a value as JSON, its numbers as they were written."""
    text = json.dumps(value, ensure_ascii=False)
    return _spelled(value) if _has_written(value) else text


def _has_written(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_written, value.values() if isinstance(value, dict) else value))
    return isinstance(value, WrittenFloat)


def _spelled(value: Any) -> str:
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_spelled(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_spelled, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
