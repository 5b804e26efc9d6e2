"""OutputProcessor: turn the engine's new tokens for one prompt into the results that callers get."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qrt.answers.content_tokens import ContentTokens, TokenText
from qrt.answers.output import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TextDelta,
    TokenLogprobs,
)
from qrt.engine.schedule.logprobs import LogprobRows
from qrt.engine.schedule.output import Cause, StepDelta, merge
from qrt.engine.schedule.request import FinishReason
from qrt.errors import ConfigError, QrtError
from qrt.request.sampling import MAX_TOKENS_LISTED, SamplingParams
from qrt.request.thinking import Thinking
from qrt.text.answer import AnswerFormat
from qrt.text.detokenizer import Detokenizer, TextStream
from qrt.text.parts import ContentText
from qrt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Tokens that are decoded at once when the text is only read at the end. With stop strings it is done more
# often, because tokens after a stop string are computed for nothing.
TOKENS_AT_ONCE, TOKENS_WITH_STOPS = 64, 4
FAILED = "error"  # the finish_reason of a completion whose own shape leaves it no answer


@dataclass
class _Completion:
    """A completion that is being generated."""

    detokenizer: Detokenizer
    gathered: list[StepDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cause: Cause | None = None


class OutputProcessor:
    """Collects the n completions of one prompt, each of which is a request in the engine.

    answer              how the completions' texts are read; the caller that knows the model sets it
    thinking            what the engine must know of their thinking; likewise
    prompt_logprobs     log-probabilities of the prompt's tokens so far; None for the first token
    num_cached_tokens   prompt tokens found in the prefix cache
    metrics             when the request came, and its tokens
    """

    pool: str | None = None  # its requests make no vectors

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        generate: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Start with no tokens; `generate`, `priority` and `cache_salt` are those of `Engine.add`."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.generate = generate
        self.priority = priority
        self.cache_salt = cache_salt
        self.answer = AnswerFormat()
        self.thinking: Thinking | None = None
        self._tokenizer = tokenizer
        self._bad_words = encode_bad_words(params.bad_words, tokenizer)
        self._at_once = TOKENS_WITH_STOPS if params.stop_strings else TOKENS_AT_ONCE
        self._ranked = params.best_of is not None and params.best_of > params.n
        count = params.best_of or params.n
        self._indices = {f"{request_id}#{index}": index for index in range(count)}
        self._completions = [_Completion(Detokenizer(tokenizer, prompt_ids, params)) for _ in range(count)]
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(time.time())

    @property
    def engine_ids(self) -> list[str]:
        """The ids of its requests in the engine."""
        return list(self._indices)

    def engine_requests(self) -> Iterator[tuple[str, SamplingParams]]:
        """Yield id and parameters of each request to add to the engine.

        Each completion has a seed of its own, made from the given one. The first request scores the prompt.
        Completions that are to be ranked are scored.
        """
        params = self.params
        logprobs = 0 if self._ranked and params.logprobs is None else params.logprobs
        words = self._bad_words
        shared: dict[str, Any] = {"n": 1, "best_of": None, "logprobs": logprobs, "bad_words": words}
        for engine_id, index in self._indices.items():
            seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63
            if seed == -1:  # -1 means no seed; take one that no other completion has
                seed = -(2**63)
            prompt_logprobs = params.prompt_logprobs if index == 0 else None
            yield engine_id, replace(params, seed=seed, prompt_logprobs=prompt_logprobs, **shared)

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens of all completions so far."""
        return sum(len(completion.token_ids) for completion in self._completions)

    @property
    def num_listed(self) -> int:
        """The number of token ids in lists, summed over its requests."""
        params = self.params
        lists = params.logit_bias, params.allowed_token_ids or (), params.stop_token_ids, *self._bad_words
        return len(self._indices) * sum(map(len, lists))

    @property
    def num_scores(self) -> int:
        """The number of log-probabilities in its reply so far.

        They are those of the output, and those of the prompt, which each completion repeats.
        """
        params, count = self.params, 0
        if params.prompt_logprobs is not None:
            count += params.n * len(self.prompt_ids) * (params.prompt_logprobs + 1)
        if params.logprobs is not None:
            count += self.num_output_tokens * (params.logprobs + 1)
        return count

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(completion.finish_reason for completion in self._completions)

    @property
    def error(self) -> str | None:
        """What is wrong with the first completion, if all of them have ended by their own errors."""
        errors = [completion.error for completion in self._completions]
        return errors[0] if all(errors) else None

    @property
    def cause(self) -> Cause | None:
        """What the error of the first completion comes from."""
        return self._completions[0].cause

    def refuse(self, error: str) -> None:
        """End all completions before they begin, with an error of their shape."""
        for engine_id in self.engine_ids:
            self.process(
                StepDelta(engine_id, finish_reason=FinishReason.ABORT, error=error, cause=Cause.REQUEST)
            )

    def buffer(self, delta: StepDelta) -> StepDelta | None:
        """Store a delta; return all stored deltas, merged, when there are enough or the request ends.

        Use it when the text is only read at the end, and pass what it returns to `feed`.
        """
        self._note_time(delta)
        gathered = self._completions[self._indices[delta.request_id]].gathered
        gathered.append(delta)
        if len(gathered) < self._at_once and delta.finish_reason is None:
            return None
        merged = merge(gathered)
        gathered.clear()
        return merged

    def process(self, delta: StepDelta) -> TextDelta:
        """Add a delta of one of `engine_ids` and return its text; ignore what comes after the end."""
        index = self._indices[delta.request_id]
        completion = self._completions[index]
        if completion.finish_reason:
            reasons = completion.finish_reason, completion.stop_reason
            return TextDelta(index, "", (), None, *reasons, abort=False)
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached)
        if delta.prompt_scores is not None:
            self._add_prompt(delta.prompt_scores)
        shown = delta.token_ids
        stops = delta.finish_reason is FinishReason.STOP and not delta.is_whole
        if stops and not self.params.include_stop_str_in_output:
            shown = shown[:-1]  # the end-of-text or stop token is not shown
        text = completion.detokenizer.feed(shown)
        if delta.finish_reason:
            text += completion.detokenizer.finish()
        stop_string = completion.detokenizer.stop_reason
        new = _new_tokens(completion, delta, stop_string is not None)
        logprobs = self._add_tokens(completion, new, delta.logprobs)
        if stop_string is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP.value, stop_string
        elif delta.finish_reason:
            completion.finish_reason, completion.stop_reason = delta.finish_reason.value, delta.stop_reason
        if delta.error is not None:
            completion.finish_reason, completion.error = FAILED, delta.error
            completion.cause = delta.cause
        self._note_time(delta)
        abort = completion.finish_reason is not None and delta.finish_reason is None
        return TextDelta(index, text, new, logprobs, completion.finish_reason, completion.stop_reason, abort)

    def _note_time(self, delta: StepDelta) -> None:
        """Note when tokens came, and when the last completion has ended."""
        now = time.time()
        if delta.token_ids:
            first = self.metrics.first_token_time or now
            self.metrics = replace(self.metrics, first_token_time=first, last_token_time=now)
        if self.finished:
            self.metrics = replace(self.metrics, finished_time=now)

    def output(self) -> RequestOutput:
        """Return everything so far."""
        prompt_logprobs = self.prompt_logprobs if self.params.prompt_logprobs is not None else None
        outputs = [self._completion_output(index, place) for index, place in enumerate(self._best())]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            prompt_logprobs,
            outputs,
            self.finished,
            self.num_cached_tokens,
            self.metrics,
        )

    def _best(self) -> Sequence[int]:
        """Return the indices of the completions to report: all, or the likeliest of `best_of`."""
        places = range(len(self._completions))
        if not self._ranked:
            return places
        return sorted(places, key=lambda i: -self._completions[i].cumulative_logprob)[: self.params.n]

    def _completion_output(self, index: int, place: int) -> CompletionOutput:
        completion, wanted = self._completions[place], self.params.logprobs is not None
        return CompletionOutput(
            index,
            completion.detokenizer.text,
            list(completion.token_ids),  # a copy: later tokens do not change an output
            completion.cumulative_logprob if wanted else None,
            list(completion.logprobs) if wanted else None,
            completion.finish_reason,
            completion.stop_reason,
            completion.error,
        )

    def _add_tokens(
        self, completion: _Completion, new: Sequence[int], scores: LogprobRows | None
    ) -> list[TokenLogprobs] | None:
        completion.token_ids += new
        if scores is None:
            return None
        logprobs = self._describe(scores, new)
        completion.logprobs += logprobs
        completion.cumulative_logprob += sum(scores.logprobs[: len(new)].tolist())
        return logprobs

    def _add_prompt(self, scores: LogprobRows) -> None:
        start = len(self.prompt_logprobs)
        self.prompt_logprobs += self._describe(scores, self.prompt_ids[start : start + len(scores)])

    def _describe(self, scores: LogprobRows, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Return a dictionary per token, of the token itself and the likeliest ones."""
        rows = zip(
            token_ids,
            scores.logprobs.tolist(),
            scores.ranks.tolist(),
            scores.top_ids.tolist(),
            scores.top_logprobs.tolist(),
            strict=False,  # tokens after a stop string are dropped
        )
        text: Callable[[int], str | None] = self.token_text if self.params.detokenize else lambda _: None
        described = []
        for token, logprob, rank, top_ids, top_logprobs in rows:
            entries = {token: Logprob(logprob, rank, text(token))}
            for place, (other, value) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
                entries.setdefault(other, Logprob(value, place, text(other)))
            described.append(entries)
        return described

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not."""
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        return self._tokenizer.token_bytes(token_id)

    def content_tokens(self, *, keep: bool = False, place: int = 0) -> ContentTokens:
        """Begin to match the tokens of a completion with its content; `keep` and `place` as there."""
        skip = self.params.skip_special_tokens
        stream = TextStream(self._tokenizer, self.prompt_ids, skip)
        return ContentTokens(stream, self._tokenizer.special_ids if skip else (), keep=keep, place=place)

    def prompt_tokens(self) -> list[TokenText]:
        """Return the prompt's tokens and texts; a BOS that the tokenizer added has none."""
        tokens = ContentTokens(TextStream(self._tokenizer, [], False), keep=True)
        first = self.prompt_ids[0]
        own = {first: Logprob(0.0, 0, self.token_text(first))}  # which nothing predicts
        tokens.add([own, *(row for row in self.prompt_logprobs if row is not None)])
        text = self.prompt or ""
        return tokens.feed([ContentText(text, tokens.num_chars)]) + tokens.finish()


def outputs_of(collectors: Sequence[OutputProcessor], model: str) -> list[RequestOutput]:
    """Return the outputs; log the errors of prompts, and raise the first if all of them have one.

    ConfigError where a prompt's own shape is wrong, else QrtError that names the `model`.
    """
    errors = [collector.error for collector in collectors]
    if errors and all(errors):
        kind = ConfigError if collectors[0].cause is Cause.REQUEST else QrtError
        raise kind(f"{model}: {errors[0]}" if kind is QrtError else str(errors[0]))
    for collector, error in zip(collectors, errors, strict=True):
        if error:
            logger.error("prompt %s ends with an error: %s", collector.request_id, error)
    return [collector.output() for collector in collectors]


def encode_bad_words(
    words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """Return the words as token ids; ConfigError for more of them than a request may list.

    As in vLLM, each word is encoded as the beginning of a text, and after a space if its first token is then
    another one.
    """
    encoded: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            encoded.append(tuple(word))
            continue
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids and ids not in encoded:
                encoded.append(ids)
    if (count := sum(map(len, encoded))) > MAX_TOKENS_LISTED:
        raise ConfigError(f"bad_words: expected at most {MAX_TOKENS_LISTED} token ids, got {count}")
    return tuple(encoded)


def _new_tokens(completion: _Completion, delta: StepDelta, stopped: bool) -> Sequence[int]:
    """Return the delta's tokens, up to the one that completed a stop string."""
    if not stopped:
        return delta.token_ids
    return delta.token_ids[: completion.detokenizer.num_tokens - len(completion.token_ids)]
