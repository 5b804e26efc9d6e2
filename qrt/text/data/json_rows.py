"""Read the rows of JSON files one at a time: a value per line, a list, or an object that holds the list.

`datasets` is not used: it may make times of dates, gives rows the keys of others, and refuses a file for one
broken line. Here a row is what `json` makes of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, TextIO

from qrt.errors import ConfigError
from qrt.text.data.chats import is_conversation, is_row

CHUNK = 2**20  # characters read at once
CUT = 16  # an error this close to a chunk's end may come from the cut
_VISIBLE = re.compile(r"\S")
_OPENING = re.compile(r"\s*(\[\s*\]|\[|)")  # an empty list, a list, or neither
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
    head = ""
    while not head.strip() and (line := stream.readline(CHUNK)):
        head += line
    after = stream.read(CHUNK)
    begins_with_lines = head.endswith("\n") and after.strip() and not isinstance(_decode(head), Broken)
    if not begins_with_lines and head.lstrip().startswith("[" if lines else ("[", "{")):
        values = _values(head + after, stream, where)
        first = list(islice(values, 2))
        yield from _rows_in(first[0], where) if len(first) == 1 and head.lstrip()[0] == "{" else first
        yield from values
    else:  # only "\n" ends a line: JSON strings may hold U+2028 and others
        *whole, cut = (head + after).split("\n")
        yield from _lines(chain(whole, [cut + stream.readline()], stream), where)


def _decode(line: str) -> Any:
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        return Broken(f"a line that is not JSON ({_reason(error)})")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]


def _lines(lines: Iterable[str], where: str) -> Iterator[Any]:
    good = broken = 0
    for line in filter(str.strip, lines):
        value = _decode(line)
        broken += isinstance(value, Broken)
        good += not isinstance(value, Broken)
        yield value
    if broken and not good:
        raise ConfigError(
            f"{where}: expected a JSON value per line, or one list of rows; none of its {broken} lines is "
            "JSON"
        )


def _values(text: str, stream: TextIO, where: str) -> Iterator[Any]:
    """Yield the elements of a list, or values that follow each other; `text` is what the stream begins with.

    Little more than the next value is held. As much is read as is held, so that a long one is decoded only a
    few times.
    """
    opening = _OPENING.match(text)
    assert opening
    at, mark = opening.end(), opening[1][-1:]
    passed, number = 0, 1  # the characters of the file before `text`; the row
    in_list = bool(mark)
    while mark != "]":
        try:
            value, at, mark = _next(text, at, in_list)
        except (ValueError, RecursionError) as error:
            if _is_cut(error, text, CUT) and (new := stream.read(max(CHUNK, len(text) - at))):
                passed, text, at = passed + at, text[at:] + new, 0
                continue
            if not in_list and not text[at:].strip():
                return
            reason = "the file ends too early" if _is_cut(error, text, 0) else _reason(error)
            place = passed + getattr(error, "pos", at) + 1
            raise _damaged(where, f"row {number}: {reason} at character {place}") from None
        yield value
        number += 1
    if any(map(str.strip, chain([text[at:]], stream))):
        raise _damaged(where, "text follows its list")


def _next(text: str, at: int, in_list: bool) -> tuple[Any, int, str]:
    """Decode the value at a place; return it, where to go on, and the mark before that in a list."""
    value, end = _DECODER.raw_decode(text, _visible(text, at))
    end = _visible(text, end)
    mark = text[end : end + 1] if in_list else ""
    if in_list and mark not in (",", "]"):
        raise json.JSONDecodeError("expected , or ]", text, end)
    return value, end + len(mark), mark


def _visible(text: str, at: int) -> int:
    """Return where the next character is that is not a space."""
    found = _VISIBLE.search(text, at)
    return found.start() if found else len(text)


def _is_cut(error: Exception, text: str, margin: int) -> bool:
    """Return whether an error may come from the end of the text, or from `margin` characters before it."""
    return isinstance(error, json.JSONDecodeError) and (
        error.msg.startswith("Unterminated string") or error.pos >= len(text) - margin
    )


def _damaged(where: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{where}: expected a list of rows, or a JSON value per line; got broken JSON ({reason}); correct "
        "the file or download it again"
    )


def _rows_in(value: Any, where: str) -> list[Any]:
    """Return the one list of an object; without a list, the object.

    An object with a text or a conversation is a row, whatever lists (tags, tools) it has. Texts in a list are
    rows only if the object holds nothing else: those in a config.json are not.
    """
    if is_row(value):
        return [value]
    lists = [key for key, held in value.items() if isinstance(held, list) and not is_conversation(held)]
    if len(lists) > 1:
        names = ", ".join(map(repr, lists))
        raise ConfigError(
            f"{where}: expected one list of rows, got an object with lists under {names}; save the one you "
            "mean as a file of its own"
        )
    held = value[lists[0]] if lists else []
    rows = len(value) == 1 or all(isinstance(each, dict | list) for each in held)
    return held if lists and rows else [value]
