"""ToolCallStream: split an answer that comes in pieces into text and calls, however it is cut."""

from __future__ import annotations

import re
from collections.abc import Collection

from qrt.text.detokenizer import overlap
from qrt.text.tool_calls.call import ToolCall
from qrt.text.tool_calls.formats import SPACE, Taken, ToolFormat
from qrt.text.tool_calls.outline import Outline

MAX_CALL_CHARS = 2**20  # a longer call is text
MAX_CALLS = 128  # in an answer, where further ones are text, and in a message that comes back


class Shown(str):
    """Some text that is no call; it ends at the character `end` of all that has been fed."""

    __slots__ = ("end",)
    end: int


Parts = list[Shown | ToolCall]
BETWEEN = re.compile(r"[\s;,]*")  # separators between two calls without a marker


class ToolCallStream:
    """Splits an answer into text and calls, piece by piece.

    A call that turns out to be none, or that names none of the request's tools, stays text. Text and calls
    together are the whole answer, except markers, separators, and spaces at its ends around calls.

    num_calls   calls so far
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        """Take the notation and the names of the functions that may be called."""
        self._format = format
        self._names = names
        self._text = ""
        self._at = 0  # how much of `_text` is done
        self._before = 0  # characters before `_text`
        self._call: int | None = None  # where a possible call begins in `_text`, after its marker
        self._outline = Outline(0)  # the possible call's strings and brackets
        self._seen = self._taken = 0  # its length when it was last seen, and when it was last parsed
        self._may_open = format.opening is not None  # only separators since the start or a call
        self._may_close = False  # only spaces since a call
        self._space = ""  # held back: spaces at the end, or before a call
        self._begun = False  # whether some text is shown
        self.num_calls = 0

    def feed(self, text: str) -> Parts:
        """Return, in order, the text that cannot be part of a call, and the calls that are complete."""
        if self._call is None:
            self._before += self._at
            self._text, self._at = self._text[self._at :], 0
        self._text += text
        shown: Parts = []
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
            shown += self._accept(taken)
        return shown

    def finish(self) -> Parts:
        """Return what is held back: text, and the complete calls of a list that is cut off."""
        shown: Parts = []
        if self._call is not None and (taken := self._cut_off()):
            shown += self._accept(taken)
        rest, end = self._text[self._at :], len(self._text)
        closing = self._format.closing
        if self._may_close and closing and closing.startswith(rest.strip()):
            end = self._at
        elif self._may_open and self.num_calls and BETWEEN.fullmatch(rest):
            end = self._at
        self._give(shown, end)
        if not self.num_calls and self._space:
            shown.append(self._shown(self._space, len(self._text)))
        self._before += len(self._text)
        self._text, self._at, self._call, self._space = "", 0, None, ""
        return shown

    def _give(self, shown: Parts, end: int) -> None:
        """Show the text up to `end`; hold back the spaces there, because a call or nothing may follow."""
        text = self._text[self._at : end]
        body = text.rstrip()
        if not body:
            self._space += text
            return
        space, self._space = self._space, text[len(body) :]
        body = space + body
        body = body if self._begun or not self.num_calls else body.lstrip()
        shown.append(self._shown(body, end - len(self._space)))
        self._begun = True

    def _shown(self, text: str, end: int) -> Shown:
        shown = Shown(text)
        shown.end = self._before + end
        return shown

    def _closed(self) -> bool:
        """Skip the closing tag of the last call; return False while the tag may still come."""
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

    def _look(self, shown: Parts) -> bool:
        """Show the text up to the next call; return whether a call begins."""
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
                self._give(shown, start)
                self._at = start
            self._begin(start + len(marker))
            return True
        held = overlap(text[max(first, len(text) - len(marker)) :], marker) if marker else 0
        if self._may_open and first + held == len(text):
            return False
        self._give(shown, len(text) - held)
        self._at = len(text) - held
        self._may_open = False
        return False

    def _begin(self, call: int) -> None:
        self._call = call
        self._outline, self._seen, self._taken = Outline(call, self._format.python), 0, 0

    def _is_due(self) -> bool:
        """Return whether to parse the call so far.

        It is parsed at first, where it may have ended, and each time its length has doubled, to see whether
        it is still a call. So a long call is not parsed with every piece.
        """
        assert self._call is not None
        self._seen = len(self._text) - self._call
        ended = not self._taken or self._outline.feed(self._text)
        if not ended and self._seen < 2 * self._taken and self._seen <= MAX_CALL_CHARS:
            return False
        self._taken = self._seen
        return True

    def _take(self) -> Taken | None:
        """Read the calls; None while they may still come, ValueError where it is text."""
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

    def _fail(self, shown: Parts) -> None:
        """Show the marker as text; look for another call after it."""
        assert self._call is not None
        self._give(shown, self._call)
        self._at, self._call, self._may_open = self._call, None, False

    def _cut_off(self) -> Taken | None:
        """Return a call that the end completes, or the complete calls of a list that is cut off."""
        assert self._call is not None
        last = self._format.take_last(self._text, self._call)
        if last is not None and last[0][0].name in self._names and self.num_calls < MAX_CALLS:
            return last
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
