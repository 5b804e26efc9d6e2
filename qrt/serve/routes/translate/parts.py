"""PartsReply: what the replies of /v1/responses and /v1/messages share, which tell an answer by parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from qrt.answers.output import CompletionOutput, TextDelta, TokenLogprobs
from qrt.answers.processor import OutputProcessor
from qrt.serve.http.responses import EventReply
from qrt.serve.routes.protocol import ChatCompletionRequest
from qrt.text.answer import AnswerPart, ContentText, ReasoningText
from qrt.text.tool_calls import ToolCall

Text = type[ReasoningText] | type[ContentText]


class PartsReply(EventReply):
    """The reply to one request with one choice.

    Its parts follow each other: a run of text of one kind is one part, and so is each tool call. The methods
    that subclasses have tell of them in events; a whole reply is what these leave behind.
    """

    end = b""

    def __init__(self, chat: ChatCompletionRequest, collector: OutputProcessor) -> None:
        self.collector = collector
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self._parallel = chat.parallel_tool_calls
        self._shows_reasoning = chat.shows_reasoning
        self._stream = collector.answer.stream()
        self._opened = False
        self._kind: Text | None = None
        self._texts: list[str] = []

    def body(self) -> dict[str, Any]:
        """Return the whole reply."""
        (output,) = self.collector.output().outputs
        self.see(output.logprobs)
        for part in self.collector.answer.pieces(output.text):
            for _ in self._add(part):
                pass
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        for _ in self._close():
            pass
        self.num_reasoning_tokens = self.collector.answer.num_reasoning_tokens(output.token_ids)
        return self.whole(output)

    def events(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        """See EventReply."""
        yield from self._open()
        parts = self._stream.feed(delta.text, delta.token_ids)
        self.num_reasoning_tokens = self._stream.num_reasoning_tokens
        if delta.finish_reason:
            parts = parts + self._stream.finish()
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.see(delta.logprobs)
        for part in parts:
            yield from self._add(part)

    def closing(self) -> Iterator[bytes]:
        """See EventReply."""
        yield from self._open()
        yield from self._close()
        yield from self.ending()

    def failure(self, code: int, message: str) -> Iterator[bytes]:
        """See EventReply."""
        yield from self._open()
        yield from self.failed(code, message)

    def _open(self) -> Iterable[bytes]:
        if self._opened:
            return ()
        self._opened = True
        return self.opening()

    def _add(self, part: AnswerPart) -> Iterator[bytes]:
        if isinstance(part, ToolCall):
            if self.num_calls and not self._parallel:
                return
            yield from self._close()
            self.num_calls += 1
            yield from self.call(part)
            return
        if isinstance(part, ReasoningText) and not self._shows_reasoning:
            return
        if self._kind is not type(part):
            yield from self._close()
            self._kind = type(part)
            yield from self.begin(self._kind)
        self._texts.append(part.text)
        yield from self.text(part)

    def _close(self) -> Iterator[bytes]:
        """End the text that is open."""
        if self._kind is not None:
            kind, text = self._kind, "".join(self._texts)
            self._kind, self._texts = None, []
            yield from self.finish(kind, text)

    def see(self, rows: list[TokenLogprobs] | None) -> None:
        """Look at the log-probabilities of tokens before their parts are told."""

    @abstractmethod
    def whole(self, output: CompletionOutput) -> dict[str, Any]:
        """Return the whole reply, once all parts are told."""

    @abstractmethod
    def opening(self) -> Iterable[bytes]:
        """Return the events before all parts."""

    @abstractmethod
    def begin(self, kind: Text) -> Iterable[bytes]:
        """Return the events of a text that begins."""

    @abstractmethod
    def text(self, part: ReasoningText | ContentText) -> Iterable[bytes]:
        """Return the events of some more text."""

    @abstractmethod
    def finish(self, kind: Text, text: str) -> Iterable[bytes]:
        """Return the events of a text that is complete."""

    @abstractmethod
    def call(self, call: ToolCall) -> Iterable[bytes]:
        """Return the events of a tool call."""

    @abstractmethod
    def ending(self) -> Iterable[bytes]:
        """Return the events after all parts."""

    @abstractmethod
    def failed(self, code: int, message: str) -> Iterable[bytes]:
        """Return the events of an error."""
