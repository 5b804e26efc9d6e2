"""Answers, split into their text and their calls."""

from qrt.text.answer import AnswerFormat, ContentText
from qrt.text.tool_calls import ToolCall


def joined(parts):
    """All text of some parts, and their calls."""
    texts = [part.text if isinstance(part, ContentText) else part for part in parts]
    return (
        "".join(text for text in texts if isinstance(text, str)),
        [part for part in parts if isinstance(part, ToolCall)],
    )


def parse(format, names, text):
    """Text and calls of a whole answer."""
    return joined(AnswerFormat(format, frozenset(names)).split(text))
