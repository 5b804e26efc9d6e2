"""Rows of JSON files, one at a time: a value a line, a list, or an object that holds the list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from qrt.errors import ConfigError
from qrt.text.data.chats import is_conversation

CHUNK = 2**20  # characters read at once
CUT = 16  # characters before the end of a chunk in which a value may have been cut
LONGEST_CUT = len(".e+")  # what may follow a whole number at the end of a chunk, and belong to it
_DECODER = json.JSONDecoder(strict=False)  # takes a tab inside a string


class Broken(str):
    """Stands for a row that cannot be read, and says why."""


def read_json(stream: TextIO, lines: bool, where: str) -> Iterator[Any]:
    """Read the rows of a JSON file, told by how it begins; a line that is no JSON gives a `Broken`.

    lines   whether the suffix promises a value a line
    where   names the file in a ConfigError: it is no JSON at all, it breaks inside the list, or its object
            holds no list or several
    """
    buffer = _Buffer(stream)
    first = buffer.peek()
    if first == "[" and not buffer.begins_with_lines():
        return _elements(buffer, where)
    if first == "{" and not lines and not buffer.begins_with_lines():
        return _of_object(buffer, where)
    return _lines(buffer, where)


class _Buffer:
    """The text that was read and not yet decoded."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.text = ""
        self.at = 0
        self.passed = 0  # characters before `text`
        self.ended = False

    def more(self) -> None:
        """Read on: as much as is held again, so that a long value is not decoded often."""
        self.passed += self.at
        self.text = self.text[self.at :]
        new = self._stream.read(max(CHUNK, len(self.text)))
        self.text, self.at, self.ended = self.text + new, 0, not new

    def peek(self) -> str:
        """The next character that is no space, "" at the end."""
        while True:
            while self.at < len(self.text):
                if not self.text[self.at].isspace():
                    return self.text[self.at]
                self.at += 1
            if self.ended:
                return ""
            self.more()

    def begins_with_lines(self) -> bool:
        """Whether the first line is a whole value, and another one follows."""
        line, _, rest = self.text[self.at :].partition("\n")
        return bool(rest.strip()) and not isinstance(_decode(line), Broken)

    def value(self) -> Any:
        """Decode the next value, or give a `Broken`."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - CUT
                if self.ended or not cut:
                    reason = "the file ends inside a value" if cut else error.msg
                    return Broken(f"{reason} at character {self.passed + error.pos + 1}")
            except (ValueError, RecursionError) as error:
                return Broken(_reason(error))
            else:
                if end + LONGEST_CUT <= len(self.text) or self.ended:
                    self.at = end
                    return value
            self.more()


def _decode(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return Broken(f"a line that is not JSON ({_reason(error)})")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]


def _lines(buffer: _Buffer, where: str) -> Iterator[Any]:
    good = broken = 0
    for line in _split(buffer):
        if not line.strip():
            continue
        value = _decode(line)
        broken += isinstance(value, Broken)
        good += not isinstance(value, Broken)
        yield value
    if broken and not good:
        raise ConfigError(
            f"{where}: not JSON, in none of its {broken} lines; expected a JSON value a line, or one list of "
            "rows"
        )


def _split(buffer: _Buffer) -> Iterator[str]:
    """The lines, which end with "\\n" alone: JSON strings may hold U+2028 and others."""
    while True:
        end = buffer.text.find("\n", buffer.at)
        if end < 0 and not buffer.ended:
            buffer.more()
            continue
        yield buffer.text[buffer.at : end if end >= 0 else None]
        if end < 0:
            return
        buffer.at = end + 1


def _elements(buffer: _Buffer, where: str) -> Iterator[Any]:
    """The elements of a list that begins here, each decoded by itself."""
    buffer.at += 1
    number = 0
    mark = buffer.peek()
    while mark != "]":
        number += 1
        buffer.peek()
        value = buffer.value()
        if isinstance(value, Broken):
            raise _damaged(where, f"row {number} of its list: {value}")
        yield value
        mark = buffer.peek()
        if mark not in (",", "]"):
            found = repr(mark) if mark else "the end of the file"
            raise _damaged(where, f"behind row {number} of its list: expected , or ], got {found}")
        buffer.at += mark == ","
    buffer.at += 1
    if buffer.peek():
        raise _damaged(where, "more follows behind its list")


def _damaged(where: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{where}: not JSON ({reason}); mend the file or fetch it again: expected a list of rows, or a JSON "
        "value a line"
    )


def _of_object(buffer: _Buffer, where: str) -> Iterator[Any]:
    """The rows of an object: those of the one list it holds, or itself and the values that follow."""
    value = _whole(buffer, where)
    if buffer.peek():
        yield value
        while buffer.peek():
            yield _whole(buffer, where)
        return
    lists = [key for key, held in value.items() if isinstance(held, list) and not is_conversation(held)]
    if len(lists) > 1:
        names = ", ".join(map(repr, lists))
        raise ConfigError(
            f"{where}: expected one list of rows, got an object with lists under {names}; write the one that "
            "is meant to a file of its own"
        )
    yield from value[lists[0]] if lists else [value]


def _whole(buffer: _Buffer, where: str) -> Any:
    value = buffer.value()
    if isinstance(value, Broken):
        raise _damaged(where, value)
    return value
