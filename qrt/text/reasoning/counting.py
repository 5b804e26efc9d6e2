"""ReasoningCounter: count the tokens of thinking in an answer that comes in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qrt.text.reasoning.tags import TagStream


class ReasoningCounter:
    """Counts tokens between marks, the marks themselves not counted.

    count   tokens of thinking so far; at the end of a piece these may be the first tokens of a mark
    """

    def __init__(self, start: Sequence[int], end: Sequence[int], inside: bool, once: bool) -> None:
        """Begin inside or outside a thinking; with `once` there is one at most."""
        self._start, self._end = tuple(start), tuple(end)
        self._inside, self._once = inside, once
        self._recent: tuple[int, ...] = ()
        self._over = False
        self.count = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        """Read some more tokens."""
        if self._over:
            return
        for token in token_ids:
            mark = self._end if self._inside else self._start
            self.count += self._inside
            self._recent = (*self._recent, token)[-len(mark) :]
            if self._recent != mark:
                continue
            self.count -= len(mark) if self._inside else 0
            self._over = self._inside and self._once
            self._inside, self._recent = not self._inside, ()
            if self._over:
                return


class TextCounter:
    """Counts them by the text of each token, where marks are spread over tokens in several ways.

    count   tokens of thinking so far
    """

    def __init__(self, stream: TagStream, text_of: Callable[[int], str], end: int) -> None:
        """Begin; `end` tokens make the mark that ends the thinking."""
        self._stream, self._text_of, self._end = stream, text_of, end
        self._over = False
        self.count = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        """Read some more tokens."""
        for token in token_ids:
            if self._over:
                return
            self.count += self._stream.thinks
            self._stream.feed(self._text_of(token))
            self._over = self._stream.is_behind
            if self._over:
                self.count = max(self.count - self._end, 0)
