"""ResponseReply: write a response of /v1/responses, whole or as OpenAI's events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from qrt.answers.content_tokens import TokenText
from qrt.answers.output import CompletionOutput, TokenLogprobs
from qrt.answers.processor import OutputProcessor
from qrt.serve.http.events import event
from qrt.serve.routes.logprobs import chat_logprobs
from qrt.serve.routes.protocol import ChatCompletionRequest
from qrt.serve.routes.responses.body import ResponsesRequest
from qrt.serve.routes.translate.parts import PartsReply, Text
from qrt.text.answer import ContentText, ReasoningText
from qrt.text.tool_calls import ToolCall

CUT = {"reason": "max_output_tokens"}


class ResponseReply(PartsReply):
    """The reply to one body; `items` is its output so far."""

    def __init__(
        self,
        id: str,
        model: str,
        body: ResponsesRequest,
        chat: ChatCompletionRequest,
        collector: OutputProcessor,
    ) -> None:
        super().__init__(chat, collector)
        self.id = id
        self.items: list[dict[str, Any]] = []
        self._head = _head(id, model, body, chat, collector)
        self._num_top = (body.top_logprobs or 0) if body.wants_logprobs else None
        self._tokens = collector.content_tokens()
        self._told: list[dict[str, Any]] = []  # log-probabilities of the message that is open
        self._number = 0

    def see(self, rows: list[TokenLogprobs] | None) -> None:
        """See PartsReply."""
        self._tokens.add(rows or ())

    def whole(self, output: CompletionOutput) -> dict[str, Any]:
        """See PartsReply."""
        return self._response()

    def opening(self) -> Iterator[bytes]:
        """See PartsReply."""
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def begin(self, kind: Text) -> Iterator[bytes]:
        """See PartsReply."""
        if kind is ReasoningText:
            item = {"id": f"rs_{self._item_id}", "type": "reasoning", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{self._item_id}", "type": "message", "role": "assistant", "content": []}
        yield self._added(item)
        yield self._of_item("content_part.added", content_index=0, part=_part(kind, "", []))

    def text(self, part: ReasoningText | ContentText) -> Iterator[bytes]:
        """See PartsReply."""
        if isinstance(part, ReasoningText):
            yield self._of_item("reasoning_text.delta", content_index=0, delta=part.text)
            return
        yield self._text_delta(part.text, self._tokens.feed([part]))

    def _text_delta(self, text: str, tokens: list[TokenText]) -> bytes:
        new = [] if self._num_top is None else chat_logprobs(tokens, self._num_top, self.collector)
        self._told += new
        return self._of_item("output_text.delta", content_index=0, delta=text, logprobs=new)

    def finish(self, kind: Text, text: str) -> Iterator[bytes]:
        """See PartsReply."""
        if kind is ContentText and (rest := self._tokens.close()):  # the text ends inside a token
            yield self._text_delta("", rest)
        told, self._told = self._told, []
        part = _part(kind, text, told)
        if kind is ReasoningText:
            yield self._of_item("reasoning_text.done", content_index=0, text=text)
        else:
            yield self._of_item("output_text.done", content_index=0, text=text, logprobs=told)
        yield self._of_item("content_part.done", content_index=0, part=part)
        self.items[-1]["content"] = [part]
        yield self._done("incomplete" if self.finish_reason == "length" else "completed")

    def call(self, call: ToolCall) -> Iterator[bytes]:
        """See PartsReply."""
        item = {"id": f"fc_{self._item_id}", "type": "function_call", "call_id": call.id, "name": call.name}
        yield self._added({**item, "arguments": ""})
        yield self._of_item("function_call_arguments.delta", delta=call.arguments)
        yield self._of_item("function_call_arguments.done", arguments=call.arguments)
        self.items[-1]["arguments"] = call.arguments
        yield self._done("completed")

    def ending(self) -> Iterator[bytes]:
        """See PartsReply."""
        response = self._response()
        yield self._event(response["status"], response=response)

    def failed(self, code: int, message: str) -> Iterator[bytes]:
        """See PartsReply."""
        error = {"code": "server_error", "message": message}
        yield self._event("failed", response={**self._response("failed"), "error": error})

    @property
    def _item_id(self) -> str:
        """What is unique in the id of the next item."""
        return f"{self.id.partition('_')[2]}_{len(self.items)}"

    def _added(self, item: dict[str, Any]) -> bytes:
        self.items.append({**item, "status": "in_progress"})
        return self._event("output_item.added", output_index=len(self.items) - 1, item=self.items[-1])

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the last item."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return self._event(kind, **place, **fields)

    def _done(self, status: str) -> bytes:
        self.items[-1]["status"] = status
        return self._event("output_item.done", output_index=len(self.items) - 1, item=self.items[-1])

    def _event(self, kind: str, **fields: Any) -> bytes:
        name, number = f"response.{kind}", self._number
        self._number += 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    def _response(self, status: str | None = None) -> dict[str, Any]:
        """Return the response with its output and usage so far; without a status it has ended."""
        incomplete = self.finish_reason == "length"
        if ended := status is None:
            status = "incomplete" if incomplete else "completed"
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": CUT if incomplete else None,
            "output": list(self.items),
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        collector = self.collector
        num_input, num_output = len(collector.prompt_ids), collector.num_output_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": collector.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }


def _part(kind: Text, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind is ContentText:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "reasoning_text", "text": text}


def _head(
    id: str, model: str, body: ResponsesRequest, chat: ChatCompletionRequest, collector: OutputProcessor
) -> dict[str, Any]:
    """Return what all events of a response say of it: its settings, as they were understood."""
    format = (body.text and body.text.format and body.text.format.model_dump(by_alias=True)) or {
        "type": "text"
    }
    tools = [{"strict": None, "parameters": None, **tool.model_dump()} for tool in body.tools or ()]
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": chat.parallel_tool_calls,
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "temperature": collector.params.temperature,
        "top_p": collector.params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": format},
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
    }
