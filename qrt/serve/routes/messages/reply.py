"""MessageReply: write a message of /v1/messages, whole or as Anthropic's events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from qrt.answers.output import CompletionOutput
from qrt.answers.processor import OutputProcessor
from qrt.serve.http.anthropic_errors import anthropic_error
from qrt.serve.http.events import event
from qrt.serve.routes.protocol import ChatCompletionRequest
from qrt.serve.routes.translate.parts import PartsReply, Text
from qrt.text.answer import ContentText, ReasoningText
from qrt.text.tool_calls import ToolCall


class MessageReply(PartsReply):
    """The reply to one body; `blocks` is its content so far."""

    ping = event({"type": "ping"}, "ping")

    def __init__(
        self, model: str, chat: ChatCompletionRequest, collector: OutputProcessor, request_id: str
    ) -> None:
        super().__init__(chat, collector)
        self.blocks: list[dict[str, Any]] = []
        self._request_id = request_id
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def whole(self, output: CompletionOutput) -> dict[str, Any]:
        """See PartsReply."""
        return {**self._head, "content": self.blocks, **self._stop(), "usage": self._usage()}

    def opening(self) -> Iterator[bytes]:
        """See PartsReply."""
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._head, **nothing, "usage": self._usage()})

    def begin(self, kind: Text) -> Iterator[bytes]:
        """See PartsReply."""
        yield self._started(_block(kind, "", ""))

    def text(self, part: ReasoningText | ContentText) -> Iterator[bytes]:
        """See PartsReply."""
        delta = (
            {"type": "text_delta", "text": part.text}
            if isinstance(part, ContentText)
            else {"type": "thinking_delta", "thinking": part.text}
        )
        yield self._of_block("content_block_delta", delta=delta)

    def finish(self, kind: Text, text: str) -> Iterator[bytes]:
        """See PartsReply. Clients send a signature back with the thinking; here it says nothing."""
        self.blocks[-1] = _block(kind, text, signature := uuid.uuid4().hex)
        if kind is not ContentText:
            yield self._of_block(
                "content_block_delta", delta={"type": "signature_delta", "signature": signature}
            )
        yield self._of_block("content_block_stop")

    def call(self, call: ToolCall) -> Iterator[bytes]:
        """See PartsReply."""
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        yield self._started({**block, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield self._of_block("content_block_delta", delta=delta)
        self.blocks[-1] = {**block, "input": json.loads(call.arguments)}
        yield self._of_block("content_block_stop")

    def ending(self) -> Iterator[bytes]:
        """See PartsReply."""
        yield _event("message_delta", delta=self._stop(), usage=self._usage())
        yield _event("message_stop")

    def failed(self, code: int, message: str) -> Iterator[bytes]:
        """See PartsReply."""
        yield event(anthropic_error(code, message, self._request_id), "error")

    def _started(self, block: dict[str, Any]) -> bytes:
        self.blocks.append(block)
        return self._of_block("content_block_start", content_block=block)

    def _of_block(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the last block."""
        return _event(kind, index=len(self.blocks) - 1, **fields)

    def _stop(self) -> dict[str, Any]:
        """Return why the message has ended."""
        stopped = self.stop_reason if isinstance(self.stop_reason, str) else None
        if self.finish_reason == "length":
            limit = self.collector.params.max_tokens
            reached = limit is None or self.collector.num_output_tokens >= limit
            reason = "max_tokens" if reached else "model_context_window_exceeded"
        elif stopped is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self) -> dict[str, Any]:
        """Return the token counts so far; as in Anthropic's API, input is what the cache did not have."""
        collector = self.collector
        cached = collector.num_cached_tokens
        return {
            "input_tokens": len(collector.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": collector.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
        }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _block(kind: Text, text: str, signature: str) -> dict[str, Any]:
    if kind is ContentText:
        return {"type": "text", "text": text}
    return {"type": "thinking", "thinking": text, "signature": signature}
