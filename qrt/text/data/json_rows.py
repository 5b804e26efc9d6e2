"""Read the rows of JSON files one at a time: a value per line, a list, or an object that holds the list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from qrt.errors import ConfigError
from qrt.text.data.chats import is_conversation, is_row

CHUNK = 2**20  # characters read at once
CUT = 16  # an error this close to a chunk's end may come from the cut
LONGEST_CUT = len(".e+")  # a number this close to a chunk's end may continue in the next chunk
_DECODER = json.JSONDecoder(strict=False)  # allows control characters, such as a tab, inside a string


class Broken(str):
    """The reason why a row cannot be read; stands in the row's place."""


def read_json_rows(stream: TextIO, lines: bool, where: str) -> Iterator[Any]:
    """Yield the rows of a JSON file. The file's beginning decides how it is read.

    A line that is not JSON yields a `Broken`. ConfigError where no line is JSON, a list or an object is
    damaged, or an object holds several lists of rows.

    lines   whether the suffix promises one value per line
    where   names the file in errors
    """
    buffer = _Buffer(stream)
    first = buffer.peek()
    if first == "[" and not buffer.begins_with_lines():
        return _elements(buffer, where)
    if first == "{" and not lines and not buffer.begins_with_lines():
        return _of_object(buffer, where)
    return _lines(buffer, where)


class _Buffer:
    """The text that is read and not yet decoded."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.text = ""
        self.at = 0
        self.passed = 0  # characters of the file before `text`
        self.ended = False

    def more(self) -> None:
        """Read at least as much as is held, so that a long value is decoded only a few times."""
        self.passed += self.at
        self.text = self.text[self.at :]
        new = self._stream.read(max(CHUNK, len(self.text)))
        self.text, self.at, self.ended = self.text + new, 0, not new

    def peek(self) -> str:
        """Return the next character that is not a space; "" at the end."""
        while True:
            while self.at < len(self.text):
                if not self.text[self.at].isspace():
                    return self.text[self.at]
                self.at += 1
            if self.ended:
                return ""
            self.more()

    def begins_with_lines(self) -> bool:
        """Return whether the first line is a complete value and more text follows it."""
        line, _, rest = self.text[self.at :].partition("\n")
        return bool(rest.strip()) and not isinstance(_decode(line), Broken)

    def value(self) -> Any:
        """Decode the next value; return a `Broken` where it is not JSON."""
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
            f"{where}: expected a JSON value per line, or one list of rows; none of its {broken} lines is "
            "JSON"
        )


def _split(buffer: _Buffer) -> Iterator[str]:
    """Yield the lines. Only "\\n" ends one: JSON strings may hold U+2028 and others."""
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
    """Yield the elements of the list that begins here, each decoded on its own."""
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
            raise _damaged(where, f"after row {number} of its list: expected , or ], got {found}")
        buffer.at += mark == ","
    buffer.at += 1
    if buffer.peek():
        raise _damaged(where, "text follows its list")


def _damaged(where: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{where}: expected a list of rows, or a JSON value per line; got broken JSON ({reason}); correct "
        "the file or download it again"
    )


def _of_object(buffer: _Buffer, where: str) -> Iterator[Any]:
    """Yield the rows of an object's one list; without a list, the object and the values that follow.

    An object with a text or a conversation is a row, whatever lists (tags, tools) it has. Texts in a list are
    rows only if the object holds nothing else: those in a config.json are not.
    """
    value = _whole(buffer, where)
    if buffer.peek():
        yield value
        while buffer.peek():
            yield _whole(buffer, where)
        return
    if is_row(value):
        yield value
        return
    lists = [key for key, held in value.items() if isinstance(held, list) and not is_conversation(held)]
    if len(lists) > 1:
        names = ", ".join(map(repr, lists))
        raise ConfigError(
            f"{where}: expected one list of rows, got an object with lists under {names}; save the one you "
            "mean as a file of its own"
        )
    held = value[lists[0]] if lists else []
    rows = len(value) == 1 or all(isinstance(each, dict | list) for each in held)
    yield from held if lists and rows else [value]


def _whole(buffer: _Buffer, where: str) -> Any:
    value = buffer.value()
    if isinstance(value, Broken):
        raise _damaged(where, value)
    return value
