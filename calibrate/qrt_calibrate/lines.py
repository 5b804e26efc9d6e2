"""Lines of UTF-8 text files and the JSON rows of .jsonl: calibration text, and prompts to measure with.

A line ends with "\\n" alone: JSON strings may hold U+2028, U+0085 and others that `str.splitlines` breaks at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrt.errors import ConfigError


def read_text(path: Path, flag: str, encoding: str = "utf-8") -> str:
    """All of a file; ConfigError naming `flag` where it is not UTF-8."""
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{flag}: {str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None


def read_lines(path: Path, flag: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1; a byte order mark is none of the text."""
    for number, line in enumerate(read_text(path, flag, "utf-8-sig").split("\n"), 1):
        if line.strip():
            yield number, line


def parse(content: str) -> Any:
    """The value of some JSON; ValueError where it is none, or where a string holds half of a surrogate pair
    (of an emoji that was cut), which no tokenizer takes."""
    value = json.loads(content)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair") from None
    return value


def read_rows(path: Path, flag: str) -> Iterator[tuple[int, Any]]:
    """The JSON values of the lines, with their numbers; ConfigError naming the line that is none."""
    for number, line in read_lines(path, flag):
        try:
            yield number, parse(line)
        except ValueError as error:
            raise ConfigError(f"{flag}: {path}, line {number} is not JSON ({error})") from None
