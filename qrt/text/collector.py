"""RequestCollector: what the engine adds to the completions of one prompt, as callers get it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qrt.engine.schedule.output import StepDelta, merge
from qrt.engine.schedule.request import FinishReason
from qrt.engine.schedule.scores import Scores
from qrt.errors import ConfigError
from qrt.sampling_params import MAX_TOKENS_LISTED, SamplingParams
from qrt.text.detokenizer import Detokenizer, TokenPlaces
from qrt.text.output import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    TextDelta,
    TokenLogprobs,
)
from qrt.text.tokenizer import Tokenizer

# Tokens that text is made of at once, where nobody reads it before the end. Stop strings are looked for more
# often: the tokens behind one have been computed for nothing.
TOKENS_AT_ONCE, TOKENS_WITH_STOPS = 64, 4


@dataclass
class _Completion:
    """One completion in the making."""

    detokenizer: Detokenizer
    gathered: list[StepDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestCollector:
    """One prompt with its n completions, each a request of its own in the engine.

    prompt_logprobs     so far; None for the first token
    num_cached_tokens   of the prompt, found in the prefix cache
    """

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
        """`generate`, `priority` and `cache_salt` as `Engine.add` has them."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.generate = generate
        self.priority = priority
        self.cache_salt = cache_salt
        self._tokenizer = tokenizer
        self._bad_words = encode_bad_words(params.bad_words, tokenizer)
        self._at_once = TOKENS_WITH_STOPS if params.stop_strings else TOKENS_AT_ONCE
        self._ranked = params.best_of is not None and params.best_of > params.n
        count = params.best_of or params.n
        self._indices = {f"{request_id}#{index}": index for index in range(count)}
        self._completions = [_Completion(Detokenizer(tokenizer, prompt_ids, params)) for _ in range(count)]
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_cached_tokens = 0

    @property
    def engine_ids(self) -> list[str]:
        """Ids of its requests in the engine."""
        return list(self._indices)

    def engine_requests(self) -> Iterator[tuple[str, SamplingParams]]:
        """Id and parameters of each request to add to the engine. A seed gives each completion its own; the
        prompt is scored once; completions to be ranked are scored."""
        params = self.params
        logprobs = 0 if self._ranked and params.logprobs is None else params.logprobs
        words = self._bad_words
        shared: dict[str, Any] = {"n": 1, "best_of": None, "logprobs": logprobs, "bad_words": words}
        for engine_id, index in self._indices.items():
            seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63
            if seed == -1:  # which would be none; of the others none is so far away
                seed = -(2**63)
            prompt_logprobs = params.prompt_logprobs if index == 0 else None
            yield engine_id, replace(params, seed=seed, prompt_logprobs=prompt_logprobs, **shared)

    @property
    def num_output_tokens(self) -> int:
        """Over all completions, so far."""
        return sum(len(completion.token_ids) for completion in self._completions)

    @property
    def num_listed(self) -> int:
        """Token ids that its requests list, each its own."""
        params = self.params
        lists = params.logit_bias, params.allowed_token_ids or (), params.stop_token_ids, *self._bad_words
        return len(self._indices) * sum(map(len, lists))

    @property
    def num_scores(self) -> int:
        """Log-probabilities in its reply: those of the prompt, which each completion repeats, and of the
        output so far."""
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

    def gather(self, delta: StepDelta) -> StepDelta | None:
        """Keep a delta, where nobody reads the text before the end; all that was kept is returned, to be fed,
        once it is worth the work or the request ends."""
        gathered = self._completions[self._indices[delta.request_id]].gathered
        gathered.append(delta)
        if len(gathered) < self._at_once and delta.finish_reason is None:
            return None
        merged = merge(gathered)
        gathered.clear()
        return merged

    def feed(self, delta: StepDelta) -> TextDelta:
        """Take in a delta of one of `engine_ids`; what comes after the end is ignored."""
        index = self._indices[delta.request_id]
        completion = self._completions[index]
        if completion.finish_reason:
            reasons = completion.finish_reason, completion.stop_reason
            return TextDelta(index, "", (), None, *reasons, abort=False)
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached)
        if delta.prompt_scores is not None:
            self._add_prompt(delta.prompt_scores)
        shown = delta.token_ids
        if delta.finish_reason is FinishReason.STOP and not self.params.include_stop_str_in_output:
            shown = shown[:-1]  # the end-of-text or stop token is not text
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
        abort = completion.finish_reason is not None and delta.finish_reason is None
        return TextDelta(index, text, new, logprobs, completion.finish_reason, completion.stop_reason, abort)

    def output(self) -> RequestOutput:
        """Everything so far."""
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
        )

    def _best(self) -> Sequence[int]:
        """The completions to report: all, or the likeliest of `best_of`."""
        places = range(len(self._completions))
        if not self._ranked:
            return places
        return sorted(places, key=lambda i: -self._completions[i].cumulative_logprob)[: self.params.n]

    def _completion_output(self, index: int, place: int) -> CompletionOutput:
        completion, wanted = self._completions[place], self.params.logprobs is not None
        return CompletionOutput(
            index,
            completion.detokenizer.text,
            list(completion.token_ids),  # a copy: an output is not changed by what comes later
            completion.cumulative_logprob if wanted else None,
            list(completion.logprobs) if wanted else None,
            completion.finish_reason,
            completion.stop_reason,
        )

    def _add_tokens(
        self, completion: _Completion, new: Sequence[int], scores: Scores | None
    ) -> list[TokenLogprobs] | None:
        completion.token_ids += new
        if scores is None:
            return None
        logprobs = self._describe(scores, new)
        completion.logprobs += logprobs
        completion.cumulative_logprob += sum(scores.logprobs[: len(new)].tolist())
        return logprobs

    def _add_prompt(self, scores: Scores) -> None:
        start = len(self.prompt_logprobs)
        self.prompt_logprobs += self._describe(scores, self.prompt_ids[start : start + len(scores)])

    def _describe(self, scores: Scores, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Per token that came: itself and the likeliest, as dictionaries."""
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
        """Of one token, special or not."""
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Of one token alone, though it be a part of a character."""
        return self._tokenizer.token_bytes(token_id)

    def output_places(self, start: int) -> TokenPlaces:
        """Of a completion's tokens, in a text in which theirs begins at `start`."""
        return TokenPlaces(self._tokenizer, self.prompt_ids, self.params.skip_special_tokens, start)

    def prompt_places(self) -> TokenPlaces:
        """Of the prompt's tokens. BOS has no text where the tokenizer has put it before one."""
        first, special = self.prompt_ids[0], self._tokenizer.special_ids
        added = first in special and not (self.prompt or "").startswith(self.token_text(first))
        return TokenPlaces(self._tokenizer, [], False, 0, unseen=int(added))


def encode_bad_words(
    words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """The words as token ids: as the text's beginning, and after a space where that begins with another token
    (as in vLLM). ConfigError for more of them than a request may list."""
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
        raise ConfigError(f"bad_words: got {count} token ids, wanted at most {MAX_TOKENS_LISTED}")
    return tuple(encoded)


def _new_tokens(completion: _Completion, delta: StepDelta, stopped: bool) -> Sequence[int]:
    """The delta's tokens, up to the one that completed a stop string."""
    if not stopped:
        return delta.token_ids
    return delta.token_ids[: completion.detokenizer.num_tokens - len(completion.token_ids)]
