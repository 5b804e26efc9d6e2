"""Request: what the scheduler knows of one generation. Only the scheduler edits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import numpy as np

from qrt.engine.schedule.plan import Ban, Chunk, Decode, Pool, SamplingRules, Scoring
from qrt.mem.manager import SequenceKV
from qrt.mem.slots import Ints
from qrt.request.sampling import SamplingParams

ALL = 1 << 62  # more tokens than any request has


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's and vLLM's words."""

    STOP = "stop"  # end-of-text or stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # by the caller, or by an error in a step


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and what has been generated for it.

    prompt        int32 [P]
    prompt_len    P
    stop_ids      tokens that end it, but not before `params.min_tokens` outputs
    max_len       length, prompt and output together, at which it ends; P for a request that only scores
    order         sort key of requests: (priority, number of arrival)
    cache_salt    it shares cached prefixes only with requests of the same salt
    pool          the kind of vectors that it asks for instead of tokens; None: none
    rope_offset   the row of the RoPE tables for its position 0; set when it is started or resumed
    output        sampled tokens that are known
    pending       number of tokens that launched steps sample and that are not known yet
    length        number of tokens, prompt, output and pending
    in_flight     launched steps that it takes part in and that have not been committed
    seq, row      its slots and its row of the request table; seq is None while it waits
    covered       length up to which it has slots; ALL once it has all that it may need
    num_computed  tokens whose K/V have been written, or will be by launched steps
    prefill_len   tokens it was started or resumed with; it decodes once they are computed
    num_scored    prompt tokens after the first whose log-probability has been reported
    num_cached    tokens found in the prefix cache when it first ran
    published     whether others can share its whole prompt
    is_whole      whether its grammar has ended it
    discard_next  whether to discard the token that the oldest launched step samples for it
    """

    id: str
    prompt: Ints
    params: SamplingParams
    sampling: SamplingRules
    stop_ids: frozenset[int]
    max_len: int
    order: tuple[int, int]
    cache_salt: str | None = None
    pool: str | None = None
    rope_offset: int = 0
    output: list[int] = field(default_factory=list)
    pending: int = 0
    in_flight: int = 0
    seq: SequenceKV | None = None
    row: int = -1
    num_computed: int = 0
    prefill_len: int = 0
    num_scored: int = 0
    num_cached: int | None = None
    published: bool = False
    is_whole: bool = False
    discard_next: bool = False
    prompt_len: int = field(init=False)
    length: int = field(init=False)
    covered: int = 0
    _banned_until: int = field(init=False)
    _decode: Decode | None = None

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt)
        self.length = self.prompt_len + len(self.output) + self.pending
        self._banned_until = ALL if self.params.bad_words else self.prompt_len + self.params.min_tokens

    @property
    def ids(self) -> Ints:
        """All known tokens, int32 [length - pending]."""
        return (
            np.concatenate([self.prompt, np.asarray(self.output, np.int32)]) if self.output else self.prompt
        )

    @property
    def salt(self) -> str | None:
        """The salt under which its K/V are cached: K of one RoPE table is of no use with another."""
        if self.cache_salt is None and not self.rope_offset:
            return None
        return f"{self.rope_offset}:{self.cache_salt or ''}"

    @property
    def generates(self) -> bool:
        """Whether it samples tokens at all."""
        return self.max_len > len(self.prompt)

    @property
    def reuses(self) -> bool:
        """Whether it may begin with tokens of the prefix cache: they have no logits and no hidden states."""
        return not self.scoring and self.pool in (None, "last")

    @property
    def caches_prompt(self) -> bool:
        """Whether its prompt goes to the prefix cache."""
        return self.generates or self.pool == "last"

    @property
    def decoding(self) -> bool:
        """Whether its next step computes one token, the one sampled last."""
        return self.num_computed >= self.prefill_len

    @property
    def scoring(self) -> bool:
        """Whether prompt tokens still wait for their log-probability."""
        return self.params.prompt_logprobs is not None and self.num_scored < len(self.prompt) - 1

    @property
    def banned(self) -> tuple[Ban, ...]:
        """The tokens that must not be sampled next."""
        return tuple(self._banned()) if self.length < self._banned_until else ()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ends, by the tokens known so far; None while it goes on."""
        if self.output:
            if self.is_whole:
                return FinishReason.STOP
            if len(self.output) > self.params.min_tokens and self.output[-1] in self.stop_ids:
                return FinishReason.STOP
            return FinishReason.LENGTH if len(self.prompt) + len(self.output) >= self.max_len else None
        done = self.decoding and not self.in_flight and not self.generates
        return (FinishReason.STOP if self.pool else FinishReason.LENGTH) if done else None

    def scores(self, start: int, end: int) -> Scoring | None:
        """Return the scoring of the prompt tokens after positions [start, end), without those done before."""
        if not self.scoring or self.params.prompt_logprobs is None:
            return None
        first, last = max(start, self.num_scored), min(end, len(self.prompt) - 1)
        if first >= last:
            return None
        targets: Ints = self.prompt[first + 1 : last + 1]
        return Scoring(first - start, targets, self.params.prompt_logprobs)

    def append(self, tokens: Sequence[int]) -> int:
        """Add tokens behind the known ones, up to its end; they are computed as a chunk. Return how many.

        What a launched step samples for it does not count.
        """
        if self.pending:
            self._take_back()
        known = self.prompt_len + len(self.output)
        added = tokens[: self.max_len - known]
        stop = next((i for i, token in enumerate(added) if token in self.stop_ids), len(added))
        added = added[: stop + 1]
        self.output += added
        self.length = self.prefill_len = known + len(added)
        return len(added)

    def repeat(self) -> None:
        """Compute the last known token again: what the launched step samples for it does not count."""
        self._take_back()
        self.num_computed, self.prefill_len = self.length - 1, self.length

    def _take_back(self) -> None:
        """Forget the token that the launched step samples."""
        self.pending -= 1
        self.length -= 1
        self.discard_next = True

    def decode(self) -> Decode:
        """Return its part of a step in which it decodes."""
        made = self._decode
        if made is None or made.row != self.row or self.length < self._banned_until or made.banned:
            self._decode = made = Decode(self.id, self.row, self.sampling, self.banned)
        return made

    def chunk(self, budget: int) -> Chunk:
        """Return the next tokens of its prefill, at most `budget`."""
        start = self.num_computed
        end = min(start + budget, self.prefill_len)
        return Chunk(
            self.id,
            self.row,
            start,
            self.ids[start:end],
            samples=self.generates and end == self.prefill_len,
            sampling=self.sampling,
            banned=self.banned,
            scoring=self.scores(start, end),
            pool=self._pool(end),
        )

    def _pool(self, end: int) -> Pool | None:
        """Return what the chunk that ends at `end` gives to its vector."""
        ends = end == self.prompt_len
        return None if self.pool is None or (self.pool == "last" and not ends) else Pool(self.pool, ends)

    def _banned(self) -> Iterator[Ban]:
        if len(self.output) + self.pending < self.params.min_tokens:
            yield from map(Ban, self.stop_ids)
        output, pending = self.output, bool(self.pending)  # at most one is pending when a step is planned
        for word in cast("tuple[tuple[int, ...], ...]", self.params.bad_words):  # the engine takes no text
            # The ban applies if the text ends with the word's tokens but the last. A pending token is
            # compared on the device, those before it here.
            known = len(word) - 1 - pending
            if known > 0 and not (
                output and output[-1] == word[known - 1] and tuple(output[-known:]) == word[:known]
            ):
                continue
            yield Ban(word[-1], after=word[-2]) if pending and len(word) > 1 else Ban(word[-1])
