"""AnswerStream: split an answer that comes in pieces into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qrt.text.tool_calls import ToolCall, ToolCallStream, ToolFormat

PIECE = 4096  # characters of a whole answer that are read at once


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Some text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """Some text of the answer itself."""

    text: str


Part = ReasoningText | ContentText | ToolCall


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one prompt are read.

    tools   the notation of tool calls; None: calls are text
    names   the functions that may be called
    """

    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()

    def stream(self) -> AnswerStream:
        """Begin to read an answer that comes in pieces."""
        return AnswerStream(self)

    def split(self, text: str) -> list[Part]:
        """Split a whole answer; neighbouring texts of one kind are joined."""
        stream = self.stream()
        parts = [
            part for start in range(0, len(text), PIECE) for part in stream.feed(text[start : start + PIECE])
        ]
        return _joined(parts + stream.finish())


class AnswerStream:
    """Splits one answer into its parts, in order, however it is cut into pieces.

    num_calls   tool calls so far
    """

    def __init__(self, format: AnswerFormat) -> None:
        self._calls = ToolCallStream(format.tools, format.names) if format.tools else None

    @property
    def num_calls(self) -> int:
        """The number of tool calls so far."""
        return self._calls.num_calls if self._calls else 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Part]:
        """Return the parts that are certain after some more text, and the tokens that have come with it."""
        if not self._calls:
            return [ContentText(text)] if text else []
        return _parts(self._calls.feed(text))

    def finish(self) -> list[Part]:
        """Return what is held back, at the end of the answer."""
        return _parts(self._calls.finish()) if self._calls else []


def _parts(found: Iterable[str | ToolCall]) -> list[Part]:
    return [ContentText(part) if isinstance(part, str) else part for part in found if part]


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Join neighbouring texts of one kind."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, ContentText) and isinstance(last, ContentText):
            joined[-1] = ContentText(last.text + part.text)
        elif isinstance(part, ReasoningText) and isinstance(last, ReasoningText):
            joined[-1] = ReasoningText(last.text + part.text)
        else:
            joined.append(part)
    return joined
