"""Reply bodies and server-sent events of the two OpenAI endpoints, from the collectors' output."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from qrt.serve.output import CompletionDelta, CompletionOutput, Logprob, RequestCollector, TokenLogprobs
from qrt.serve.protocol import ChatCompletionRequest, CompletionRequest


class Reply(ABC):
    """One request's reply: a body at the end, or events on the way. Choices count prompt-major: p * n + k."""

    kind: str
    chunk_kind: str

    def __init__(self, id: str, model: str, n: int, collectors: Sequence[RequestCollector]) -> None:
        self.id = id
        self.model = model
        self.created = int(time.time())
        self.collectors = collectors
        self._n = n

    def body(self) -> dict[str, Any]:
        """The whole reply."""
        choices = [
            self.choice(index * self._n + completion.index, index, completion)
            for index, collector in enumerate(self.collectors)
            for completion in collector.output().outputs
        ]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Token counts over all prompts and choices."""
        outputs = [collector.output() for collector in self.collectors]
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        }

    def opening(self) -> Iterator[str]:
        """Events before the first token."""
        yield from ()

    def events(self, index: int, delta: CompletionDelta) -> Iterator[str]:
        """Events of one delta of collector `index`; none while there is nothing to show."""
        if delta.text or delta.logprobs or delta.finish_reason:
            yield self._chunk([self.chunk_choice(index * self._n + delta.index, delta)])

    def usage_event(self) -> str:
        """The chunk after the last one, where asked for."""
        return _event({**self._head(self.chunk_kind), "choices": [], "usage": self.usage()})

    def error_event(self, error: dict[str, Any]) -> str:
        """An error after the stream has begun."""
        return _event(error)

    @abstractmethod
    def choice(self, number: int, index: int, completion: CompletionOutput) -> dict[str, Any]:
        """One finished choice of collector `index`."""

    @abstractmethod
    def chunk_choice(self, number: int, delta: CompletionDelta) -> dict[str, Any]:
        """One choice of a chunk."""

    def _chunk(self, choices: list[dict[str, Any]]) -> str:
        return _event({**self._head(self.chunk_kind), "choices": choices})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class CompletionReply(Reply):
    """`text_completion`."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, id: str, model: str, body: CompletionRequest, collectors: Sequence[RequestCollector]
    ) -> None:
        super().__init__(id, model, body.n, collectors)
        self._echo = body.echo
        self._offsets: dict[int, int] = {}  # characters sent of each choice

    def opening(self) -> Iterator[str]:
        """With echo, each choice begins with its prompt."""
        if self._echo:
            for number in range(len(self.collectors) * self._n):
                text = self._prompt(number // self._n)
                self._offsets[number] = len(text)
                yield self._chunk([_text_choice(number, text, None, None, None)])

    def choice(self, number: int, index: int, completion: CompletionOutput) -> dict[str, Any]:
        prompt = self._prompt(index) if self._echo else ""
        logprobs = _legacy_logprobs(completion.logprobs, len(prompt))
        text = prompt + completion.text
        return _text_choice(number, text, logprobs, completion.finish_reason, completion.stop_reason)

    def chunk_choice(self, number: int, delta: CompletionDelta) -> dict[str, Any]:
        offset = self._offsets.get(number, 0)
        self._offsets[number] = offset + len(delta.text)
        logprobs = _legacy_logprobs(delta.logprobs, offset)
        return _text_choice(number, delta.text, logprobs, delta.finish_reason, delta.stop_reason)

    def _prompt(self, index: int) -> str:
        return self.collectors[index].prompt or ""


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
        self, id: str, model: str, body: ChatCompletionRequest, collectors: Sequence[RequestCollector]
    ) -> None:
        super().__init__(id, model, body.n, collectors)
        self._num_top = body.top_logprobs or 0

    def opening(self) -> Iterator[str]:
        """The role comes first, in a chunk of its own."""
        for number in range(self._n):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}])

    def choice(self, number: int, index: int, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": number,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": _chat_logprobs(completion.logprobs, self._num_top),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def chunk_choice(self, number: int, delta: CompletionDelta) -> dict[str, Any]:
        return {
            "index": number,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": _chat_logprobs(delta.logprobs, self._num_top),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _legacy_logprobs(rows: list[TokenLogprobs] | None, offset: int) -> dict[str, Any] | None:
    """Four parallel lists; `offset` is where the first token's text starts."""
    if rows is None:
        return None
    chosen = [next(iter(row.values())) for row in rows]
    offsets = []
    for entry in chosen:
        offsets.append(offset)
        offset += len(entry.decoded_token)
    return {
        "tokens": [entry.decoded_token for entry in chosen],
        "token_logprobs": [entry.logprob for entry in chosen],
        "top_logprobs": [{e.decoded_token: e.logprob for e in row.values()} for row in rows],
        "text_offset": offsets,
    }


def _chat_logprobs(rows: list[TokenLogprobs] | None, num_top: int) -> dict[str, Any] | None:
    """One entry a token: the token that came, and the `num_top` likeliest in order."""
    if rows is None:
        return None
    content = []
    for row in rows:
        chosen = next(iter(row.values()))
        top = sorted((e for e in row.values() if e.rank <= num_top), key=lambda e: e.rank)
        content.append({**_chat_token(chosen), "top_logprobs": [_chat_token(e) for e in top]})
    return {"content": content}


def _chat_token(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode())}
