"""ToolCallStream: an answer that comes in pieces to text and calls, the same however it is cut."""

from __future__ import annotations

import re
from collections.abc import Collection

from qrt.text.detokenizer import overlap
from qrt.text.tool_calls.call import ToolCall
from qrt.text.tool_calls.formats import SPACE, Taken, ToolFormat
from qrt.text.tool_calls.outline import Outline

MAX_CALL_CHARS = 2**20  # what is longer is text
MAX_CALLS = 128  # of an answer, and of a message that comes back; further ones are text
PIECE = 4096  # characters of a whole answer that are looked at together
BETWEEN = re.compile(r"[\s;,]*")  # what may stand between two calls without a marker


class ToolCallStream:
    """Text in pieces to text and calls in pieces.

    What is no call after all, or one of a function that is none of the request's tools, stays text. Text and
    calls together are all of the answer but for markers, separators, and the space around calls at its ends.

    num_calls   calls so far
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        """`names`: what may be called."""
        self._format = format
        self._names = names
        self._text = ""
        self._at = 0  # how far `_text` is done with
        self._call: int | None = None  # where the call begins that may be there, behind its marker
        self._outline = Outline(0)  # of it
        self._seen = self._taken = 0  # how long it was when it was last looked at, and last parsed
        self._may_open = format.opening is not None  # nothing but separators since the start or a call
        self._may_close = False  # nothing but space since a call
        self._space = ""  # not given out: the end, or what stands before a call
        self._begun = False  # some text is out
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text that is certainly none of a call, and the calls that are complete."""
        if self._call is None:
            self._text, self._at = self._text[self._at :], 0
        self._text += text
        shown: list[str] = []
        calls: list[ToolCall] = []
        while self._closed() and (self._call is not None or self._look(shown)):
            if not self._is_due():
                break
            try:
                taken = self._take()
            except (ValueError, TypeError, KeyError, RecursionError):
                self._fail(shown)
                continue
            if taken is None:
                break
            calls += self._accept(taken)
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return what was held back: text, and calls of a list that was cut off between two of them."""
        shown: list[str] = []
        calls: list[ToolCall] = []
        if self._call is not None and (taken := self._cut_off()):
            calls = self._accept(taken)
        rest = self._text[self._at :]
        closing = self._format.closing
        if self._may_close and closing and closing.startswith(rest.strip()):
            rest = ""
        elif self._may_open and self.num_calls and BETWEEN.fullmatch(rest):
            rest = ""
        self._give(shown, rest)
        if not self.num_calls:
            shown.append(self._space)
        self._text, self._at, self._call, self._space = "", 0, None, ""
        return "".join(shown), calls

    def _give(self, shown: list[str], text: str) -> None:
        """Show a text without the space at its end, which waits: behind it may come a call, or nothing."""
        body = text.rstrip()
        if not body:
            self._space += text
            return
        space, self._space = self._space, text[len(body) :]
        body = space + body
        shown.append(body if self._begun or not self.num_calls else body.lstrip())
        self._begun = True

    def _closed(self) -> bool:
        """Pass the closing tag of the last call; False while it may still come."""
        closing = self._format.closing
        if not self._may_close or closing is None:
            return True
        start = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches everywhere
        tag = self._text[start : start + len(closing)]
        if tag != closing and closing.startswith(tag):
            return False
        if tag == closing:
            self._at = start + len(closing)
        self._may_close = False
        return True

    def _look(self, shown: list[str]) -> bool:
        """Look for the beginning of a call, and show the text before it; False when none has begun."""
        text, first = self._text, self._at
        opening, marker = self._format.opening, self._format.marker
        if self._may_open:
            between = BETWEEN if self.num_calls else SPACE
            first = between.match(text, first).end()  # type: ignore[union-attr]  # it matches everywhere
            if first == len(text):
                return False
            if text[first] == opening:
                self._begin(first)
                return True
        start = text.find(marker, first) if marker else -1
        if marker and start >= 0:
            if start > first or not self._may_open:
                self._give(shown, text[self._at : start])
                self._at = start
            self._begin(start + len(marker))
            return True
        held = overlap(text[max(first, len(text) - len(marker)) :], marker) if marker else 0
        if self._may_open and first + held == len(text):
            return False
        self._give(shown, text[self._at : len(text) - held])
        self._at = len(text) - held
        self._may_open = False
        return False

    def _begin(self, call: int) -> None:
        self._call = call
        self._outline, self._seen, self._taken = Outline(call, self._format.python), 0, 0

    def _is_due(self) -> bool:
        """Whether to parse the call so far: at first, where it may have ended, and to see whether it is one
        each time it has doubled; a long one is not parsed with every piece."""
        assert self._call is not None
        self._seen = len(self._text) - self._call
        ended = not self._taken or self._outline.feed(self._text)
        if not ended and self._seen < 2 * self._taken and self._seen <= MAX_CALL_CHARS:
            return False
        self._taken = self._seen
        return True

    def _take(self) -> Taken | None:
        """Read the calls; None while they may still come, ValueError when it is text after all."""
        assert self._call is not None
        taken = self._format.take(self._text, self._call)
        end = len(self._text) if taken is None else taken[1]
        if end - self._call > MAX_CALL_CHARS:
            raise ValueError("too long for a call")
        if taken is not None:
            self._check(taken[0])
        return taken

    def _check(self, calls: list[ToolCall]) -> None:
        if any(call.name not in self._names for call in calls):
            raise ValueError("none of the request's tools")
        if self.num_calls + len(calls) > MAX_CALLS:
            raise ValueError("too many calls")

    def _accept(self, taken: Taken) -> list[ToolCall]:
        calls, self._at = taken
        self._call = None
        self.num_calls += len(calls)
        self._may_open, self._may_close = self._format.opening is not None, True
        return calls

    def _fail(self, shown: list[str]) -> None:
        """The marker is text, and so is what follows it unless another call begins there."""
        assert self._call is not None
        self._give(shown, self._text[self._at : self._call])
        self._at, self._call, self._may_open = self._call, None, False

    def _cut_off(self) -> Taken | None:
        """The calls of a list that has no end: those that are complete."""
        assert self._call is not None
        start = SPACE.match(self._text, self._call).end()  # type: ignore[union-attr]  # it matches everywhere
        outline = Outline(start, self._format.python)
        if self._text[start : start + 1] != "[" or outline.feed(self._text) or outline.inner is None:
            return None
        try:
            taken = self._format.take(self._text[start : outline.inner] + "]", 0)
            if taken is not None:
                self._check(taken[0])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        end = outline.inner
        if taken is not None and not self._text[end:].strip(", \n"):
            end = len(self._text)
        return None if taken is None else (taken[0], end)


def parse(format: ToolFormat, names: Collection[str], text: str) -> tuple[str, list[ToolCall]]:
    """Read a whole answer: what is text in it, and the calls of functions in `names`."""
    stream = ToolCallStream(format, names)
    shown, calls = [], []
    for start in range(0, len(text), PIECE):
        piece, found = stream.feed(text[start : start + PIECE])
        shown.append(piece)
        calls += found
    piece, found = stream.finish()
    return "".join([*shown, piece]), calls + found
