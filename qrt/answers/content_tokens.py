"""ContentTokens: find the part of an answer's content that each of its tokens wrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from qrt.answers.output import TokenLogprobs
from qrt.text.detokenizer import TextStream
from qrt.text.parts import AnswerPart, ContentText


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token's log-probabilities, and its part of the text, which begins there at `place`."""

    row: TokenLogprobs
    text: str
    place: int


@dataclass(slots=True)
class _Waiting:
    """A token whose text, from `start` to `end` of all text, is not yet known to be content."""

    row: TokenLogprobs
    start: int
    end: int


class ContentTokens:
    """Matches tokens with the parts that an answer was split into: their texts joined are the content.

    The parts of a character have no text, but the last one. Thinking, calls, marks, what follows a stop
    string, and tokens that are not shown, such as the end, are no content.
    """

    def __init__(
        self, stream: TextStream, unshown: Collection[int] = (), *, keep: bool = False, place: int = 0
    ) -> None:
        """Begin.

        stream    makes the text of the tokens
        unshown   tokens that are left out
        keep      return tokens without content too, with an empty text
        place     where the content begins in a longer text
        """
        self._stream = stream
        self._unshown = frozenset() if keep else frozenset(unshown)
        self._keep = keep
        self._place = place
        self._waiting: list[_Waiting] = []
        self._ranges: deque[tuple[int, str]] = (
            deque()
        )  # content: where it begins in all text, and its characters
        self._seen = self._settled = 0  # characters of all text: of tokens so far, and up to the last content

    @property
    def num_chars(self) -> int:
        """Characters of all text so far."""
        return self._seen

    def add(self, rows: Iterable[TokenLogprobs]) -> None:
        """Add tokens by their rows of log-probabilities."""
        for row in rows:
            token = next(iter(row))
            start = self._seen
            self._seen += len(self._stream.feed([token]))
            if token not in self._unshown:
                self._waiting.append(_Waiting(row, start, self._seen))

    def feed(self, parts: Iterable[AnswerPart]) -> list[TokenText]:
        """Take some more parts; return the tokens whose content is known."""
        for part in parts:
            if isinstance(part, ContentText) and part.text:
                self._ranges.append((part.end - len(part.text), part.text))
                self._settled = part.end
        return self._taken(self._settled)

    def close(self) -> list[TokenText]:
        """Return the tokens that wrote content so far, where a text ends inside one."""
        found = self._taken(self._settled)
        first = next((one for one in self._waiting if one.end > one.start), None)
        if first is not None and first.start < self._settled:
            rest = _Waiting(first.row, self._settled, first.end)
            first.end = self._settled
            found += self._taken(self._settled)
            self._waiting.insert(0, rest)  # it may have written the beginning of the next text too
        return found

    def finish(self) -> list[TokenText]:
        """Return the rest, at the end of all tokens and parts."""
        if self._waiting and (tail := len(self._stream.finish())):  # a character that is not whole
            self._waiting[-1].end += tail
        found = self._taken(max((one.end for one in self._waiting), default=0))
        if self._keep:
            found += [self._token(one, "") for one in self._waiting]
        self._waiting = []
        return found

    def _taken(self, settled: int) -> list[TokenText]:
        """Return the tokens up to one that writes beyond `settled`; those without content are dropped."""
        found: list[TokenText] = []
        group: list[_Waiting] = []  # the parts of a character, and the token that has its text
        done = 0
        for place, one in enumerate(self._waiting, start=1):
            group.append(one)
            if one.end == one.start:
                continue
            if one.end > settled:
                break
            text = self._content(one)
            if text or self._keep:
                found += [self._token(each, "") for each in group[:-1]]
                found.append(self._token(one, text))
            group, done = [], place
        self._waiting = self._waiting[done:]
        return found

    def _token(self, one: _Waiting, text: str) -> TokenText:
        token = TokenText(one.row, text, self._place)
        self._place += len(text)
        return token

    def _content(self, one: _Waiting) -> str:
        """Return the content that a token wrote."""
        texts = [
            text[max(one.start - begin, 0) : max(one.end - begin, 0)]
            for begin, text in self._ranges
            if begin < one.end
        ]
        while self._ranges and self._ranges[0][0] + len(self._ranges[0][1]) <= one.end:
            self._ranges.popleft()
        return "".join(texts)


def whole_tokens(rows: Sequence[TokenLogprobs]) -> list[TokenText]:
    """Return tokens with all of their own text, whatever becomes of it."""
    return [TokenText(row, next(iter(row.values())).decoded_token or "", 0) for row in rows]
