"""ChannelStream: split an answer that is messages in channels, as gpt-oss writes it (OpenAI's harmony).

<|channel|>analysis<|message|>I look it up.<|end|>
<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"x": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>It rains.<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Collection

from qrt.text.detokenizer import overlap
from qrt.text.parts import AnswerPart, ContentText, ReasoningText
from qrt.text.tool_calls.call import ToolCall, named_call
from qrt.text.tool_calls.stream import MAX_CALL_CHARS, MAX_CALLS

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
END = re.compile("|".join(map(re.escape, ENDS)))
LONGEST_END = max(map(len, ENDS))
HEADER_STARTS = ("<|", "to=")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")
LONGEST_HEADER = 1000


class ChannelStream:
    """Splits one answer, piece by piece.

    The channel analysis is reasoning, every other one content. A message to one of the request's functions is
    a call if its text is the JSON of an object; if not, or if it is to anything else, it is text of its
    channel. Two messages of one kind are a line apart.

    num_calls   calls so far
    """

    def __init__(self, names: Collection[str], begun: str = "") -> None:
        """Begin; `names` may be called, and the prompt's last message begins with `begun`."""
        self._names = names
        self._held = ""
        self._seen = 0  # characters of the answer so far
        self._header = True  # whether a header comes, not a text
        self._kind: type[ReasoningText] | type[ContentText] = ContentText
        self._function: str | None = None  # the function that is called
        self._call: list[str] = []  # the text of that call
        self._chars = 0  # its length
        self._last: type[ReasoningText] | type[ContentText] | None = None  # the kind of the last text
        self._between = False  # whether a message has ended since then
        self.num_calls = 0
        self.feed(begun)
        self._seen = 0
        self._held = "" if self._header else self._held
        self._last, self._between = None, False

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain."""
        self._held += text
        self._seen += len(text)
        parts: list[AnswerPart] = []
        while self._held and (self._read_header() if self._header else self._read_text(parts)):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """Return what is held back, at the end of the answer. A header that is cut off is left out."""
        parts: list[AnswerPart] = []
        if not self._header:
            self._take(parts, self._held, self._seen)
            self._end(parts, self._seen)
        elif not (head := self._held.lstrip()).startswith(HEADER_STARTS) and (head or self._last is None):
            self._give(parts, self._held, self._seen)
        self._held = ""
        return parts

    def _read_header(self) -> bool:
        """Read a header; return whether it is complete. What cannot be one is content."""
        head, at = self._held.lstrip(), self._held.find(MESSAGE)
        fits = any(start.startswith(head[: len(start)]) for start in HEADER_STARTS)
        if fits and at < 0 and len(self._held) < LONGEST_HEADER + len(MESSAGE):
            return False
        if not fits or not 0 <= at <= LONGEST_HEADER:
            self._kind, self._function, self._header = ContentText, None, False
            return True
        header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        channel, function = CHANNEL.search(header), FUNCTION.search(header)
        self._kind = ReasoningText if channel and channel[1] == "analysis" else ContentText
        called = function is not None and function[1] in self._names and self.num_calls < MAX_CALLS
        self._function = function[1] if function and called else None
        self._header = False
        return True

    def _read_text(self, parts: list[AnswerPart]) -> bool:
        """Read the text of a message; return whether its end has come."""
        text, end = self._held, END.search(self._held)
        begin = self._seen - len(text)
        if end:
            self._take(parts, text[: end.start()], begin + end.start())
            self._end(parts, begin + end.start())
            opens = end[0] in ("<|start|>", "<|channel|>")
            self._held = text[end.start() if opens else end.end() :]
            return True
        certain = len(text) - max(overlap(text[-LONGEST_END:], mark) for mark in ENDS)
        self._take(parts, text[:certain], begin + certain)
        self._held = text[certain:]
        return False

    def _take(self, parts: list[AnswerPart], text: str, end: int) -> None:
        """Keep the text of a call, show every other one; `end` is where it ends in the answer."""
        if self._function is None:
            self._give(parts, text, end)
            return
        self._call.append(text)
        self._chars += len(text)
        if self._chars > MAX_CALL_CHARS:
            self._function = None
            self._give(parts, self._called(), end)

    def _give(self, parts: list[AnswerPart], text: str, end: int) -> None:
        if not text:
            return
        if self._between and self._last is self._kind:
            text = "\n" + text
        parts.append(ContentText(text, end) if self._kind is ContentText else ReasoningText(text))
        self._last, self._between = self._kind, False

    def _end(self, parts: list[AnswerPart], end: int) -> None:
        """End a message: read its call, if it is one."""
        text = self._called()
        if self._function is not None:
            try:
                call: ToolCall | None = named_call(self._function, text)
            except (ValueError, RecursionError):
                call = None
            self._function = None
            if call is None:
                self._give(parts, text, end)
            else:
                parts.append(call)
                self.num_calls += 1
        self._header = self._between = True

    def _called(self) -> str:
        """Take the text of the call so far."""
        text, self._call, self._chars = "".join(self._call), [], 0
        return text
