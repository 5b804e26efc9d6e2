"""How far a call goes: its strings and brackets, and JSON that may be cut off anywhere."""

from __future__ import annotations

import json
import re
from typing import Any

# what may stand at the end of JSON that is not all there yet: nothing, a word's start, half a number
UNFINISHED = re.compile(r"(t(ru?)?|f(a(ls?)?)?|n(ul?)?|-|\.|[eE][+-]?)?\s*\Z")
LONGEST_ESCAPE = len(r"\u0000")
MARKS = re.compile(r"\\|\"+|'+|[\[\](){}#\n]")


class Outline:
    """The strings and brackets of a call that comes in pieces, each of which is read once.

    end     where the outermost bracket was closed last; None before
    inner   where a bracket next to the outermost was closed last: the end of a list's item; None before
    """

    def __init__(self, start: int, python: bool = False) -> None:
        """Begin at `start`, in JSON or in Python, which has more kinds of strings, and comments."""
        self._python = python
        self._seen = start
        self._depth = 0
        self._inside = ""  # what ends the string, or comment, that has begun
        self._escaped = -1  # the place behind a backslash
        self.end: int | None = None
        self.inner: int | None = None

    def feed(self, text: str) -> bool:
        """Read on in `text`, which has grown; return whether it closes the outermost bracket there."""
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
        """So many in a row; a string ends with as many as it begins with, one or Python's three."""
        while count and (self._python or quote == '"') and self._inside[:1] in ("", quote):
            wanted = len(self._inside) or (3 if self._python and count >= 3 else 1)
            if count < wanted:
                return
            self._inside = "" if self._inside else quote * wanted
            count -= wanted


def json_at(text: str, start: int) -> tuple[Any, int] | None:
    """Decode the JSON value at `start`; return it and its end, or None while it is incomplete."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as error:
        half = error.msg.startswith("Invalid \\u") and len(text) - error.pos < LONGEST_ESCAPE
        if half or error.msg.startswith("Unterminated") or UNFINISHED.match(text, error.pos):
            return None
        raise
