"""The parts of an answer: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qrt.text.tool_calls.call import ToolCall


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Some text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """Some text of the answer itself; it ends at the character `end` of all that the model has written."""

    text: str
    end: int = field(default=-1, compare=False)


AnswerPart = ReasoningText | ContentText | ToolCall


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Join neighbouring texts of one kind."""
    found: list[AnswerPart] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, ContentText) and isinstance(last, ContentText):
            found[-1] = ContentText(last.text + part.text, part.end)
        elif isinstance(part, ReasoningText) and isinstance(last, ReasoningText):
            found[-1] = ReasoningText(last.text + part.text)
        else:
            found.append(part)
    return found
