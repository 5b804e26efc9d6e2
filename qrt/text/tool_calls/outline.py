"""Find where a call ends, by its strings and brackets; read JSON that may be cut off anywhere."""

from __future__ import annotations

import json
import re
from typing import Any

from qrt.text.tool_calls.call import finite

# What JSON that is cut off may end with, from the error on: nothing, or the start of a word or of a number
UNFINISHED = re.compile(r"(t(ru?)?|f(a(ls?)?)?|n(ul?)?|-|\.|[eE][+-]?)?\s*\Z")
DECODER = json.JSONDecoder(parse_float=finite)
LONGEST_ESCAPE = len(r"\u0000")
MARKS = re.compile(r"\\|\"+|'+|[\[\](){}#\n]")


class Outline:
    """Tracks the strings and brackets of a call that comes in pieces; each piece is read once.

    end     where the outermost bracket last closed; None before
    inner   where a bracket one level further in last closed, which ends an item of a list; None before
    """

    def __init__(self, start: int, python: bool = False) -> None:
        """Begin at `start`, in JSON or in Python; Python has more kinds of strings, and comments."""
        self._python = python
        self._seen = start
        self._depth = 0
        self._inside = ""  # what ends the string or comment at the current position
        self._escaped = -1  # the position after a backslash
        self.end: int | None = None
        self.inner: int | None = None

    def feed(self, text: str) -> bool:
        """Read the new part of `text`; return whether the outermost bracket closes in it."""
        for found in MARKS.finditer(text, self._seen):
            mark, at = found[0], found.start()
            if mark[0] in "\"'" and found.end() == len(text):  # the next piece may have more of them
                self._seen = at
                return False
            if mark[0] in "\"'":
                self._quotes(mark[0], len(mark) - (at == self._escaped))
            elif self._inside:
                if at == self._escaped:
                    pass
                elif mark == "\\":
                    self._escaped = at + 1
                elif mark == self._inside:
                    self._inside = ""
            elif mark == "#" and self._python:
                self._inside = "\n"
            elif self._brackets(mark, found.end()):
                return True
        self._seen = len(text)
        return False

    def _brackets(self, mark: str, behind: int) -> bool:
        if mark in "([{":
            self._depth += 1
        elif mark in ")]}":
            self._depth -= 1
            if self._depth == 1:
                self.inner = behind
            if self._depth <= 0:
                self._seen = self.end = behind
                return True
        return False

    def _quotes(self, quote: str, count: int) -> None:
        """Read `count` quotes in a row. A string begins and ends with one, or in Python with three."""
        while count and (self._python or quote == '"') and self._inside[:1] in ("", quote):
            needed = len(self._inside) or (3 if self._python and count >= 3 else 1)
            if count < needed:
                return
            self._inside = "" if self._inside else quote * needed
            count -= needed


def json_at(text: str, start: int) -> tuple[Any, int] | None:
    """Decode the JSON value at `start`; return it and its end, or None while it is incomplete."""
    try:
        return DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        half = error.msg.startswith("Invalid \\u") and len(text) - error.pos < LONGEST_ESCAPE
        if half or error.msg.startswith("Unterminated") or UNFINISHED.match(text, error.pos):
            return None
        raise
