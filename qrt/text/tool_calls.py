"""Tool calls: read back from the text of a model, in the notations of the common chat templates.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>          (Hermes, Qwen 2.5 and 3)
    llama3_json   {"name": "f", "parameters": {...}}, after <|python_tag|> or first  (Llama 3.1)
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}] or [TOOL_CALLS]f[ARGS]{...}
    pythonic      [f(x=1), g(y="a")], first                                          (Llama 3.2 and 4)

What is no call after all, or one of a function that is none of the request's tools, stays text. Nothing of it
is ever evaluated.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from qrt.errors import ConfigError
from qrt.registry import nearest
from qrt.text.detokenizer import overlap

# what may stand at the end of JSON that is not all there yet: nothing, a word's start, half a number
UNFINISHED = re.compile(r"|t(ru?)?|f(a(ls?)?)?|n(ul?)?|-|\.|[eE][+-]?")
LONGEST_ESCAPE = len(r"\u0000")
MAX_CALL_CHARS = 2**20  # what is longer is text
OUTLINE = re.compile(r"\\|\"+|'+|[\[\](){}#\n]")


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class Outline:
    """The strings and brackets of a call that comes in pieces, each of which is read once.

    end   where the outermost bracket was closed last; None before
    """

    def __init__(self, python: bool = False) -> None:
        """Of JSON, or of Python, which has more kinds of strings, and comments."""
        self._python = python
        self._seen = 0
        self._depth = 0
        self._inside = ""  # what ends the string, or comment, that has begun
        self._escaped = -1  # the place behind a backslash
        self.end: int | None = None

    def feed(self, text: str) -> bool:
        """Whether `text`, the call so far, closes its outermost bracket behind what was read before."""
        for found in OUTLINE.finditer(text, self._seen):
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
            elif mark in "([{":
                self._depth += 1
            elif mark in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    self._seen = self.end = found.end()
                    return True
        self._seen = len(text)
        return False

    def _quotes(self, quote: str, count: int) -> None:
        """So many in a row; a string ends with as many as it begins with, one or Python's three."""
        while count and (self._python or quote == '"') and self._inside[:1] in ("", quote):
            wanted = len(self._inside) or (3 if self._python and count >= 3 else 1)
            if count < wanted:
                return
            self._inside = "" if self._inside else quote * wanted
            count -= wanted


class ToolFormat(ABC):
    """One notation.

    marker    what begins a call anywhere in the text
    opening   what begins a call at the start of the text, as a regular expression that also matches a
              beginning of itself
    closing   what ends a call, where that is no bracket
    python    whether it is Python's notation, not JSON
    """

    marker: str | None = None
    opening: re.Pattern[str] | None = None
    closing: str | None = None
    python: bool = False

    @abstractmethod
    def take(self, text: str) -> tuple[list[ToolCall], int] | None:
        """The calls at the start of `text`, behind the marker, and where they end; None while they may still
        come. ValueError when there is none."""


class Hermes(ToolFormat):
    """JSON between tags."""

    marker = "<tool_call>"
    closing = "</tool_call>"

    def take(self, text: str) -> tuple[list[ToolCall], int] | None:
        """See ToolFormat."""
        end = text.find(self.closing)
        if end < 0:
            return None
        return [_call(json.loads(text[:end]))], end + len(self.closing)


class Llama3Json(ToolFormat):
    """JSON objects, several with ; between."""

    marker = "<|python_tag|>"
    opening = re.compile(r'\{\s*("(n(a(m(e(".*)?)?)?)?)?)?$', re.DOTALL)

    def take(self, text: str) -> tuple[list[ToolCall], int] | None:
        """See ToolFormat."""
        decoded = _json_at(text, 0)
        return None if decoded is None else ([_call(decoded[0])], decoded[1])


class Mistral(ToolFormat):
    """A JSON list, or a name and JSON arguments."""

    marker = "[TOOL_CALLS]"

    def take(self, text: str) -> tuple[list[ToolCall], int] | None:
        """See ToolFormat."""
        start = len(text) - len(text.lstrip())
        if not text[start:]:
            return None
        if text[start] == "[":
            decoded = _json_at(text, start)
            return None if decoded is None else ([self._known(_call(v)) for v in decoded[0]], decoded[1])
        named = re.compile(r"([\w.-]+)(\[CALL_ID\]\w+)?(\[ARGS\])?\s*(?=\{)").match(text, start)
        if named is None:
            if "{" in text or len(text) > 1000:
                raise ValueError("no call")
            return None
        decoded = _json_at(text, named.end())
        return None if decoded is None else ([self._known(_named(named[1], decoded[0]))], decoded[1])

    @staticmethod
    def _known(call: ToolCall) -> ToolCall:
        """By an id of nine letters and digits: Mistral's templates refuse to show a call of any other."""
        return replace(call, id=uuid.uuid4().hex[:9])


class Pythonic(ToolFormat):
    """A list of calls in Python's notation."""

    opening = re.compile(r"\[(\s*[A-Za-z_][\w.]*(\(.*)?)?$", re.DOTALL)
    python = True

    def take(self, text: str) -> tuple[list[ToolCall], int] | None:
        """See ToolFormat."""
        outline = Outline(python=True)
        outline.feed(text)
        if outline.end is None:
            return None
        try:
            tree = ast.parse(text[: outline.end], mode="eval").body
        except (SyntaxError, MemoryError) as error:
            raise ValueError("no Python") from error
        if not isinstance(tree, ast.List):
            raise ValueError("no list")
        return [self._call(node) for node in tree.elts], outline.end

    @staticmethod
    def _call(node: ast.expr) -> ToolCall:
        if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
            raise ValueError("no call with named arguments")
        name = ast.unparse(node.func)
        if not re.fullmatch(r"[\w.]+", name):
            raise ValueError("no function's name")
        return _named(name, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords})


FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "pythonic": Pythonic(),
}


def tool_format(name: str, chat_template: str) -> ToolFormat | None:
    """The notation called `name`; for "auto" the one whose marker the chat template has, or None."""
    if name == "none":
        return None
    if name != "auto":
        if name not in FORMATS:
            known = [*FORMATS, "auto", "none"]
            raise ConfigError(
                f"tool_call_parser: got {name!r}, wanted one of {', '.join(known)}{nearest(name, known)}"
            )
        return FORMATS[name]
    if "<function=" in chat_template:  # XML between Hermes' tags
        return None
    return next((f for f in FORMATS.values() if f.marker and f.marker in chat_template), None)


class ToolCallStream:
    """Text in pieces to text and calls in pieces.

    num_calls   calls so far
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        """`names`: what may be called."""
        self._format = format
        self._names = names
        self._held = ""  # may become a marker or an opening
        self._call: str | None = None  # behind one
        self._outline = Outline()  # of the call
        self._seen = self._taken = 0  # how long the call was when it was last looked at, and last parsed
        self._begun = ""  # what it was
        self._at_start = True
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certainly none of a call, and the calls that are complete."""
        shown = ""
        calls: list[ToolCall] = []
        while True:
            if self._call is None:
                shown += self._look(text)
                if self._call is None:
                    return shown, calls
                self._outline, self._seen, self._taken = Outline(self._format.python), 0, 0
            else:
                self._call += text
            if not self._is_due(self._call):
                return shown, calls
            taken = self._take()
            if taken is None:
                return shown, calls
            new, rest = taken
            calls += new
            self.num_calls += len(new)
            self._call = None
            if new:
                text, self._at_start = rest, self._format.opening is not None
            else:
                shown, text, self._at_start = shown + self._begun, rest, False

    def finish(self) -> str:
        """What was held back and is no call."""
        rest = self._held + (self._begun + self._call if self._call is not None else "")
        self._held, self._call = "", None
        return rest

    def _look(self, text: str) -> str:
        """Look for the beginning of a call; the text before it, or as much as is certain."""
        text, self._held = self._held + text, ""
        if self._at_start and self.num_calls:
            text = text.lstrip("; \n")  # between two calls
        opening, marker = self._format.opening, self._format.marker
        if self._at_start and opening and (start := len(text) - len(text.lstrip())) < len(text):
            if found := opening.match(text, start):
                if found.end() > start + 1:  # more than its first character
                    self._begun, self._call = text[:start], text[start:]
                    return ""
                self._held = text
                return ""
        if marker and (start := text.find(marker)) >= 0:
            self._begun, self._call = marker, text[start + len(marker) :]
            self._at_start = False
            return text[:start]
        if not text.strip():
            self._held = text if self._at_start else ""
            return "" if self._at_start else text
        held = overlap(text, marker) if marker else 0
        if held < len(text.lstrip()):
            self._at_start = False
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _is_due(self, call: str) -> bool:
        """Whether to parse the call so far: at first, where it may have ended, and to see whether it is one
        each time it has doubled; a long one is not parsed with every piece."""
        if not self._taken:
            ended = True
        elif (closing := self._format.closing) is not None:
            ended = call.find(closing, max(0, self._seen - len(closing))) >= 0
        else:
            ended = self._outline.feed(call)
        self._seen = len(call)
        if not ended and self._seen < 2 * self._taken and self._seen <= MAX_CALL_CHARS:
            return False
        self._taken = self._seen
        return True

    def _take(self) -> tuple[list[ToolCall], str] | None:
        """Calls and the text behind them; no calls when it is text after all; None while it is open."""
        assert self._call is not None
        try:
            taken = self._format.take(self._call)
        except (ValueError, TypeError, KeyError, RecursionError):
            return [], self._call
        if taken is None:
            return ([], self._call) if len(self._call) > MAX_CALL_CHARS else None
        if any(call.name not in self._names for call in taken[0]):
            return [], self._call
        return taken[0], self._call[taken[1] :]


def parse(format: ToolFormat, names: Collection[str], text: str) -> tuple[str, list[ToolCall]]:
    """A whole answer: what is text in it, and the calls of functions in `names`."""
    stream = ToolCallStream(format, names)
    shown, calls = stream.feed(text)
    return shown + stream.finish(), calls


def _json_at(text: str, start: int) -> tuple[Any, int] | None:
    """A JSON value and its end; None while it is incomplete."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as error:
        half = error.msg.startswith("Invalid \\u") and len(text) - error.pos < LONGEST_ESCAPE
        cut_short = half or error.msg.startswith("Unterminated")
        if cut_short or UNFINISHED.fullmatch(text[error.pos :].rstrip()):
            return None
        raise


def _call(value: dict[str, Any]) -> ToolCall:
    if "arguments" not in value and "parameters" not in value:
        raise ValueError("a call without arguments")
    return _named(value["name"], value.get("arguments", value.get("parameters")))


def _named(name: object, arguments: object) -> ToolCall:
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    given = isinstance(arguments, str)
    text = str(arguments) if given else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{text}".encode()  # no lone surrogates, which no reply can hold
    return ToolCall(name, text)
