"""RequestOutput and its parts: the results that callers get, shaped as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position.

    logprob         natural logarithm
    rank            1 = likeliest
    decoded_token   the token's text; None with `detokenize` off
    """

    logprob: float
    rank: int
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]  # by token id: first the token of the text, then the likeliest


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n completions of a prompt.

    finish_reason   "stop", "length" or "abort"; "error" where its own shape leaves it no answer; None while
                    it runs
    stop_reason     the stop string or stop token id that ended it; None for end-of-text
    error           with finish_reason "error": what is wrong with the shape
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None

    def finished(self) -> bool:
        """Return whether it has ended, as in vLLM."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """When a prompt's request came and what became of it, by vLLM's names, in seconds of `time.time()`.

    first_token_time   of any of its completions; None while there is none, and so are the other two
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions. `prompt_logprobs` has None for the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics = field(compare=False)


@dataclass(slots=True)  # not frozen: one is made for every token
class TextDelta:
    """What a step added to one completion; with `abort` the engine must be told to end it."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    abort: bool
