"""Numbers as they are written: which of them a double holds, and JSON that keeps the others."""

import json
from decimal import Decimal

import pytest

from qrt.request.numbers import WrittenFloat, is_double, json_text, read_float

HELD = ["0.1", "1.0", "1e22", "5e-324", "0.10000000000000001", "0.69999999999999996", "-0.0", "1E-7"]
OTHERS = ["0.1234567890123456789", "12345678901234567.5", "9007199254740993.0", "1e-400"]


@pytest.mark.parametrize("text", HELD)
def test_doubles_are_read_as_floats(text):
    assert is_double(Decimal(text)) and type(read_float(text)) is float and read_float(text) == float(text)


@pytest.mark.parametrize("text", OTHERS)
def test_other_numbers_keep_their_digits(text):
    assert not is_double(Decimal(text))
    read = read_float(text)
    assert isinstance(read, float) and read == float(text)
    assert isinstance(read, WrittenFloat)
    assert json_text({"a": [read, "é", None]}) == f'{{"a": [{text}, "é", null]}}'


def test_integers_and_what_is_too_large():
    assert is_double(2**53) and not is_double(2**53 + 1) and not is_double(10**400)
    with pytest.raises(ValueError, match="number 1e400 is out of range"):
        read_float("1e400")


def test_other_values_are_written_as_json_does():
    for value in ({"a": [1, 2.5, True, None, "é"]}, [], "x", {1: 2}):
        assert json.loads(json_text(value)) == json.loads(json.dumps(value))
