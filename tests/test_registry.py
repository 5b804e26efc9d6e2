import sys

import pytest

from qrt.errors import UnsupportedError
from qrt.registry import Registry, nearest


def test_entries_load_on_first_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    registry = Registry("thing", {"hue": "colorsys:rgb_to_hsv", "absent": "no_such_module:x"})
    assert list(registry) == ["hue", "absent"] and "hue" in registry and "saturation" not in registry
    assert "colorsys" not in sys.modules
    function = registry["hue"]
    assert function is sys.modules["colorsys"].rgb_to_hsv
    monkeypatch.delitem(sys.modules, "colorsys")
    assert registry["hue"] is function  # kept, not imported again
    assert "colorsys" not in sys.modules


def test_unknown_name_lists_the_known_and_the_nearest():
    registry = Registry("KV format", {"fp16": "a:b", "int8": "a:b"})
    with pytest.raises(UnsupportedError, match=r"unknown KV format 'int88' \(known: fp16, int8\).*'int8'\?"):
        registry["int88"]
    with pytest.raises(UnsupportedError) as error:
        registry["zzz"]
    assert "did you mean" not in str(error.value) and "\n" not in str(error.value)


def test_nearest():
    assert nearest("w4a61", ["w4a16", "w8a8"]) == "; did you mean 'w4a16'?"
    assert nearest("banana", ["w4a16", "w8a8"]) == ""
