"""AnswerStream: split an answer that comes in pieces into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qrt.text.parts import AnswerPart, ContentText, ReasoningText, joined
from qrt.text.reasoning import Reasoning
from qrt.text.tokenizer import Tokenizer
from qrt.text.tool_calls import ToolCall, ToolCallStream, ToolFormat
from qrt.text.tool_calls.stream import Shown

__all__ = ["AnswerFormat", "AnswerStream", "ContentText", "AnswerPart", "ReasoningText"]
PIECE = 4096  # characters of a whole answer that are read at once


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one prompt are read.

    tools       the notation of tool calls; None: calls are text, but those of channels
    names       the functions that may be called
    reasoning   the thinking of the answers; None: there is none, or its marks are unknown
    separate    whether the thinking is told apart; if not, it is content with its marks
    """

    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    reasoning: Reasoning | None = None
    separate: bool = True

    def has_hidden_marks(self, tokenizer: Tokenizer) -> bool:
        """Return whether a decoder that skips special tokens skips marks of calls or of the thinking."""
        if self.tools and self.tools.marker in tokenizer.special_names:
            return True
        return self.separate and self.reasoning is not None and self.reasoning.marks.hidden

    def stream(self) -> AnswerStream:
        """Begin to read an answer that comes in pieces."""
        return AnswerStream(self)

    def split(self, text: str) -> list[AnswerPart]:
        """Split a whole answer; neighbouring texts of one kind are joined."""
        return joined(self.pieces(text))

    def pieces(self, text: str) -> list[AnswerPart]:
        """Split a whole answer as a stream does."""
        stream = self.stream()
        parts = [
            part for start in range(0, len(text), PIECE) for part in stream.feed(text[start : start + PIECE])
        ]
        return parts + stream.finish()

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Count the tokens of thinking in a whole answer."""
        stream = self.stream()
        stream.feed("", token_ids)
        return stream.num_reasoning_tokens


class AnswerStream:
    """Splits one answer into its parts, in order, however it is cut into pieces.

    num_calls   tool calls so far
    """

    def __init__(self, format: AnswerFormat) -> None:
        reasoning = format.reasoning
        split = reasoning if format.separate else None
        self._split = split.stream(format.names) if split else None
        self._counter = reasoning.counter() if reasoning else None
        self._calls = ToolCallStream(format.tools, format.names) if format.tools else None
        self._seen = 0  # characters, where nothing is split off
        self._searched = self._shift = 0  # characters that may hold calls, and those left out before them
        self.num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of thinking so far."""
        return self._counter.count if self._counter else 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[AnswerPart]:
        """Return the parts that are certain after some more text, and the tokens that have come with it."""
        if self._counter:
            self._counter.feed(token_ids)
        if self._split:
            return self._with_calls(self._split.feed(text))
        self._seen += len(text)
        return self._with_calls([ContentText(text, self._seen)] if text else [])

    def finish(self) -> list[AnswerPart]:
        """Return what is held back, at the end of the answer."""
        parts = self._with_calls(self._split.finish()) if self._split else []
        if self._calls:
            parts += self._counted(self._placed(self._calls.finish()))
        return parts

    def _with_calls(self, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
        """Return the parts, with the calls that are in their content."""
        found: list[AnswerPart] = []
        for part in parts:
            if self._calls and isinstance(part, ContentText):
                self._searched += len(part.text)
                self._shift = part.end - self._searched
                found += self._placed(self._calls.feed(part.text))
            else:
                found.append(part)
        return self._counted(found)

    def _counted(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        self.num_calls += sum(isinstance(part, ToolCall) for part in parts)
        return parts

    def _placed(self, found: Iterable[Shown | ToolCall]) -> list[AnswerPart]:
        """Return the text around calls at its place in the answer, and the calls."""
        return [
            part if isinstance(part, ToolCall) else ContentText(str(part), part.end + self._shift)
            for part in found
            if part
        ]
