"""Write reply bodies and server-sent events of the two OpenAI endpoints from the collectors' output."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from qrt.answers.content_tokens import ContentTokens, whole_tokens
from qrt.answers.output import CompletionOutput, TextDelta, TokenLogprobs
from qrt.answers.processor import OutputProcessor
from qrt.serve.http.events import event
from qrt.serve.http.responses import EventReply
from qrt.serve.routes.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from qrt.serve.routes.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields
from qrt.text.answer import AnswerPart, ContentText, ReasoningText
from qrt.text.tool_calls import ToolCall


class Reply(EventReply):
    """The reply of one request: a body at the end, or events. Choice k of prompt p has number p * n + k."""

    kind: str
    chunk_kind: str

    def __init__(
        self, id: str, model: str, body: SamplingFields, collectors: Sequence[OutputProcessor]
    ) -> None:
        self.id = id
        self.model = model
        self.created = int(time.time())
        self.collectors = collectors
        self._n = body.n
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._token_ids = body.return_token_ids
        self._by_id = body.return_tokens_as_token_ids
        options = body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_in_chunks = (
            options is not None and options.include_usage and options.continuous_usage_stats
        )
        self._opened: set[int] = set()  # collectors whose choices have begun
        # a stream's counts so far, so that a chunk's usage need not look through all choices
        self._num_prompt = sum(len(collector.prompt_ids) for collector in collectors)
        self._num_output = 0
        self._num_reasoning: int | None = None  # tokens of thinking, where the answer may have some
        self._num_cached = [0] * len(collectors)
        self._all_cached = 0

    def body(self) -> dict[str, Any]:
        """Return the reply's body."""
        choices = [
            self.choice(index * self._n + completion.index, index, completion)
            for index, collector in enumerate(self.collectors)
            for completion in collector.output().outputs
        ]
        output = sum(collector.num_output_tokens for collector in self.collectors)
        cached = sum(collector.num_cached_tokens for collector in self.collectors)
        return {**self._head(self.kind), "choices": choices, "usage": self._usage(output, cached)}

    def _usage(self, output: int, cached: int) -> dict[str, Any]:
        """Return the token counts over all prompts and choices."""
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": output,
            "total_tokens": self._num_prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self._num_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning}
        return usage

    def _usage_so_far(self) -> dict[str, Any]:
        """Return the token counts of a stream so far."""
        return self._usage(self._num_output, self._all_cached)

    def events(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        """Yield the events of one delta of collector `index`; none while there is nothing to show."""
        number = index * self._n + delta.index
        cached = self.collectors[index].num_cached_tokens
        self._all_cached += cached - self._num_cached[index]
        self._num_cached[index] = cached
        if index not in self._opened and (delta.text or delta.token_ids or delta.finish_reason):
            self._opened.add(index)
            for each in range(index * self._n, (index + 1) * self._n):  # all choices, before tokens count
                for choice in self.opening(each, index):
                    yield self._chunk(choice, self.opening_fields(each))
        self.count(number, delta.token_ids)
        choices: list[dict[str, Any]] = []
        if delta.text or delta.logprobs or delta.finish_reason:
            choices += self.chunk_choices(number, delta)
        if self._token_ids and delta.token_ids:
            choices = choices or [self.empty_choice(number)]  # their text comes later, but no token is missed
            choices[0]["token_ids"] = list(delta.token_ids)
        for choice in choices:
            yield self._chunk(choice)

    def closing(self) -> Iterator[bytes]:
        """Yield the chunk with the usage, if asked for, and the end."""
        if self._usage_at_end:
            yield event({**self._head(self.chunk_kind), "choices": [], "usage": self._usage_so_far()})

    def count(self, number: int, token_ids: Sequence[int]) -> None:
        """Count the tokens of a choice's delta."""
        self._num_output += len(token_ids)

    @abstractmethod
    def choice(self, number: int, index: int, completion: CompletionOutput) -> dict[str, Any]:
        """Return one finished choice of collector `index`."""

    @abstractmethod
    def opening(self, number: int, index: int) -> Iterator[dict[str, Any]]:
        """Yield the choices of chunks before the first token's."""

    @abstractmethod
    def chunk_choices(self, number: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the choices of a delta's chunks, mostly one."""

    @abstractmethod
    def empty_choice(self, number: int) -> dict[str, Any]:
        """Return the choice of a chunk without text."""

    def opening_fields(self, number: int) -> dict[str, Any]:
        """Return what the chunk that opens a choice has beside it."""
        return {}

    def _chunk(self, choice: dict[str, Any], fields: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        data = {**self._head(self.chunk_kind), "choices": [choice], **fields}
        if self._usage_in_chunks:
            data["usage"] = self._usage_so_far()
        elif self._usage_at_end:
            data["usage"] = None
        return event(data)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class CompletionReply(Reply):
    """`text_completion`."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, id: str, model: str, body: CompletionRequest, collectors: Sequence[OutputProcessor]
    ) -> None:
        super().__init__(id, model, body, collectors)
        self._echo = body.echo
        self._echo_logprobs = body.echo and body.logprobs is not None
        self._tokens: dict[int, ContentTokens] = {}  # of the choices of a stream
        self._ends: dict[int, int] = {}  # the characters of their texts so far

    def opening(self, number: int, index: int) -> Iterator[dict[str, Any]]:
        """Yield the prompt first, with echo its text and with `return_token_ids` its token ids."""
        if self._echo or self._token_ids:
            choice = _text_choice(number, self._echoed(index), self._prompt_logprobs_of(index), None, None)
            yield choice | (
                {"prompt_token_ids": self.collectors[index].prompt_ids} if self._token_ids else {}
            )

    def empty_choice(self, number: int) -> dict[str, Any]:
        """See Reply."""
        return _text_choice(number, "", None, None, None)

    def choice(self, number: int, index: int, completion: CompletionOutput) -> dict[str, Any]:
        """See Reply."""
        prompt = self._echoed(index)
        logprobs = None
        if completion.logprobs is not None:
            tokens = self._new_tokens(index)
            tokens.add(completion.logprobs)
            found = tokens.feed([ContentText(completion.text, len(completion.text))]) + tokens.finish()
            logprobs = completion_logprobs(found, self._by_id)
        if logprobs and (before := self._prompt_logprobs_of(index)):
            logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        text = prompt + completion.text
        choice = _text_choice(number, text, logprobs, completion.finish_reason, completion.stop_reason)
        if self._prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(self.collectors[index])
        if self._token_ids:
            choice["prompt_token_ids"] = self.collectors[index].prompt_ids
            choice["token_ids"] = completion.token_ids
        return choice

    def chunk_choices(self, number: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """See Reply."""
        logprobs = self._logprobs_of(number, delta)
        if not (delta.text or logprobs or delta.finish_reason):
            return  # the text of these tokens comes later
        yield _text_choice(number, delta.text, logprobs, delta.finish_reason, delta.stop_reason)

    def _echoed(self, index: int) -> str:
        """Return the prompt's text with echo, else an empty text."""
        return (self.collectors[index].prompt or "") if self._echo else ""

    def _logprobs_of(self, number: int, delta: TextDelta) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens whose text a delta completes."""
        if delta.logprobs is None and number not in self._tokens:
            return None
        tokens = self._tokens.setdefault(number, self._new_tokens(number // self._n))
        tokens.add(delta.logprobs or ())
        end = self._ends[number] = self._ends.get(number, 0) + len(delta.text)
        found = tokens.feed([ContentText(delta.text, end)])
        if delta.finish_reason:
            found += tokens.finish()
        return completion_logprobs(found, self._by_id) if found else None

    def _new_tokens(self, index: int) -> ContentTokens:
        """Return what matches a completion's tokens with its text; each token has an entry."""
        return self.collectors[index].content_tokens(keep=True, place=len(self._echoed(index)))

    def _prompt_logprobs_of(self, index: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the echoed prompt, whose first token has none."""
        if not self._echo_logprobs:
            return None
        logprobs = completion_logprobs(self.collectors[index].prompt_tokens(), self._by_id)
        for name in ("token_logprobs", "top_logprobs"):
            logprobs[name][0] = None
        return logprobs


def _text_choice(
    number: int, text: str, logprobs: dict[str, Any] | None, finish: str | None, stop: int | str | None
) -> dict[str, Any]:
    return {
        "index": number,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": stop,
    }


class ChatReply(Reply):
    """`chat.completion`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, id: str, model: str, body: ChatCompletionRequest, collectors: Sequence[OutputProcessor]
    ) -> None:
        """Make the reply; how answers are read is said by the collector."""
        super().__init__(id, model, body, collectors)
        self._num_top = body.top_logprobs or 0
        self._parallel = body.parallel_tool_calls
        self._called = "stop" if body.calls.named else "tool_calls"  # as OpenAI and vLLM end such answers
        self._shows_reasoning = body.shows_reasoning
        self._format = collectors[0].answer
        self._num_reasoning = None if self._format.reasoning is None else 0
        self._streams = [self._format.stream() for _ in range(self._n)]
        self._tokens: dict[int, ContentTokens] = {}  # of the choices
        self._waits = not body.stream_reasoning
        self._waiting = [""] * self._n  # thinking that is shown when it has ended

    def body(self) -> dict[str, Any]:
        """See Reply."""
        body = super().body()
        if self._prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self.collectors[0])
        return {**body, **self.opening_fields(0)}

    def opening_fields(self, number: int) -> dict[str, Any]:
        """Return the prompt's token ids if they are asked for; all choices have one prompt."""
        wanted = self._token_ids and number == 0
        return {"prompt_token_ids": self.collectors[0].prompt_ids} if wanted else {}

    def empty_choice(self, number: int) -> dict[str, Any]:
        """See Reply."""
        return _chat_chunk(number, {})

    def opening(self, number: int, index: int) -> Iterator[dict[str, Any]]:
        """Yield the role first, in a chunk of its own."""
        yield _chat_chunk(number, {"role": "assistant", "content": ""})

    def count(self, number: int, token_ids: Sequence[int]) -> None:
        """See Reply."""
        super().count(number, token_ids)
        if self._num_reasoning is not None:
            stream = self._streams[number]
            before = stream.num_reasoning_tokens
            stream.feed("", token_ids)
            self._num_reasoning += stream.num_reasoning_tokens - before

    def choice(self, number: int, index: int, completion: CompletionOutput) -> dict[str, Any]:
        """See Reply."""
        parts = self._format.pieces(completion.text)
        self._tokens.pop(number, None)  # a whole answer begins anew
        reasoning, content, calls = self._fields(parts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, **reasoning}
        reason = completion.finish_reason
        if calls or reasoning:
            message["content"] = content or None
        if calls:
            message["tool_calls"] = [_tool_call(call) for call in (calls if self._parallel else calls[:1])]
            reason = self._called if reason == "stop" else reason
        if self._num_reasoning is not None:
            self._num_reasoning += self._format.num_reasoning_tokens(completion.token_ids)
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(number, completion.logprobs, parts, ended=True),
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
            **({"token_ids": completion.token_ids} if self._token_ids else {}),
        }

    def _logprobs(
        self, number: int, rows: list[TokenLogprobs] | None, parts: Sequence[AnswerPart], *, ended: bool
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of the content that some more rows and parts complete.

        Where the tokens' ids are asked for, each token has an entry with all of its own text.
        """
        collector = self.collectors[0]
        if collector.params.logprobs is None:
            return None
        if self._by_id or self._token_ids:
            found = whole_tokens(rows or ())
        else:
            tokens = self._tokens.setdefault(number, collector.content_tokens())
            tokens.add(rows or ())
            found = tokens.feed(parts) + (tokens.finish() if ended else [])
        if not found and not ended:
            return None
        return {"content": chat_logprobs(found, self._num_top, collector, self._by_id)}

    def chunk_choices(self, number: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """See Reply. A tool call is one chunk, with its name and all its arguments as a string."""
        reason = delta.finish_reason
        stream = self._streams[number]
        first = stream.num_calls
        parts = stream.feed(delta.text)
        if reason:
            parts += stream.finish()
        logprobs = self._logprobs(number, delta.logprobs, parts, ended=reason is not None)
        fields, text, calls = self._fields(parts)
        fields = self._ended(number, fields, bool(text or calls or reason))
        if fields and calls:
            yield _chat_chunk(number, fields)
            fields = {}
        for place, call in enumerate(calls, start=first):
            if place and not self._parallel:
                break
            yield _chat_chunk(number, {"tool_calls": [{"index": place, **_tool_call(call)}]})
        if stream.num_calls:
            reason = self._called if reason == "stop" else reason
        if not (fields or text or reason or logprobs):
            return
        choice = _chat_chunk(number, {**fields, "content": text} if text else fields, logprobs, reason)
        choice["stop_reason"] = delta.stop_reason
        yield choice

    def _fields(self, parts: Sequence[AnswerPart]) -> tuple[dict[str, str], str, list[ToolCall]]:
        """Return the fields of the thinking, by its older and newer name, the content and the calls."""
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
        content = "".join(part.text for part in parts if isinstance(part, ContentText))
        shown = _thought(reasoning) if self._shows_reasoning else {}
        return shown, content, [part for part in parts if isinstance(part, ToolCall)]

    def _ended(self, number: int, fields: dict[str, str], ended: bool) -> dict[str, str]:
        """Return the fields of the thinking to show: all that wait, when it has ended."""
        if not self._waits:
            return fields
        self._waiting[number] += fields.get("reasoning", "")
        if not ended:
            return {}
        fields, self._waiting[number] = _thought(self._waiting[number]), ""
        return fields


def _thought(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _chat_chunk(
    number: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
