"""Plan: one step as the scheduler decided it, and StepResult: what it gave. Immutable, on the host.

A plan holds copies of everything the step needs. It stays valid while the scheduler goes on: the next plan is
made before the tokens of this one are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from qrt.engine.schedule.logprobs import LogprobRows, Vectors
from qrt.mem.slots import Ints
from qrt.request.sampling import SamplingParams

ANY = -1  # as `Ban.after`: the token is banned whatever came before


class Ban(NamedTuple):
    """A token that must not be sampled if the token before it is `after`."""

    token: int
    after: int = ANY


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Logit adjustments of one request: bias, allowed tokens and penalties.

    bias         token id -> value added
    allowed      the only tokens that may be sampled; None: all
    repetition, presence, frequency   the penalties
    growth       (length from which EOS grows likelier, factor per token); None: never
    """

    bias: Mapping[int, float]
    allowed: tuple[int, ...] | None
    repetition: float
    presence: float
    frequency: float
    growth: tuple[int, float] | None

    @classmethod
    def of(cls, params: SamplingParams, prompt_len: int) -> Adjustment | None:
        """Return the adjustments that `params` asks for; None if there are none."""
        growth = params.exponential_decay_length_penalty
        made = cls(
            params.logit_bias,
            None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            None if growth is None else (prompt_len + growth[0], growth[1]),
        )
        return None if made == cls({}, None, 1.0, 0.0, 0.0, None) else made


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """How the tokens of one request are sampled. temperature 0: greedy; top_k 0, top_p 1, min_p 0: off.

    plain   whether temperature and seed say all; stored, as each step asks each request
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    num_logprobs: int | None
    min_p: float = 0.0
    adjustment: Adjustment | None = None
    plain: bool = field(init=False, compare=False)

    @classmethod
    def of(cls, params: SamplingParams, prompt_len: int, seed: int) -> SamplingRules:
        """Make the rules of a request from its parameters."""
        return cls(
            0.0 if params.greedy else params.temperature,
            max(params.top_k, 0),
            params.top_p,
            seed,
            params.logprobs,
            params.min_p,
            Adjustment.of(params, prompt_len),
        )

    def __post_init__(self) -> None:
        plain = not self.filtered and self.adjustment is None and self.num_logprobs is None
        object.__setattr__(self, "plain", plain)

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class Admission(NamedTuple):
    """A request that has just got a row of the request table, with its tokens so far.

    rope_offset  as in `qrt.arch.rope.rope_offset`
    """

    row: int
    sampling: SamplingRules
    prompt: Ints
    output: Sequence[int] = ()
    rope_offset: int = 0


class Placement(NamedTuple):
    """New slots int32 [n] of a request, for positions [start, start + n), in a group of layers."""

    row: int
    start: int
    slots: Ints
    group: int = 0


class Decode(NamedTuple):
    """A request that computes the token it sampled last and samples the next; the row has the position."""

    request_id: str
    row: int
    sampling: SamplingRules
    banned: tuple[Ban, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log-probabilities to return for a chunk's tokens [first, first + n).

    targets   int32 [n], the tokens that follow them
    num_top   likeliest tokens to name at each position too
    """

    first: int
    targets: Ints
    num_top: int


class Pool(NamedTuple):
    """What a chunk gives to its request's vector.

    kind   as in `qrt.arch.pooling.Pooling`
    ends   whether the prompt ends with it
    """

    kind: str
    ends: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of a request, int32 [n], computed at positions [start, start + n).

    samples   whether these are its last known tokens, so that the next one is sampled
    pool      what it gives to the request's vector; None: nothing
    """

    request_id: str
    row: int
    start: int
    tokens: Ints
    samples: bool
    sampling: SamplingRules
    banned: tuple[Ban, ...] = ()
    scoring: Scoring | None = None
    pool: Pool | None = None

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Plan:
    """One step: new rows and slots, all decodes, and chunks of prefill."""

    admitted: tuple[Admission, ...]
    placed: tuple[Placement, ...]
    decodes: tuple[Decode, ...]
    chunks: tuple[Chunk, ...]

    @cached_property
    def sampled(self) -> tuple[Decode | Chunk, ...]:
        """The decodes and chunks that sample a token, in the order of `StepResult.tokens`."""
        return self.decodes + tuple(chunk for chunk in self.chunks if chunk.samples)

    @cached_property
    def sampled_at(self) -> Sequence[int]:
        """The index of the step's token after which each of `sampled` samples."""
        at, ends = len(self.decodes), []
        for chunk in self.chunks:
            at += len(chunk.tokens)
            if chunk.samples:
                ends.append(at - 1)
        return [*range(len(self.decodes)), *ends]

    @property
    def works(self) -> tuple[Decode | Chunk, ...]:
        """All decodes and chunks, one per request."""
        return self.decodes + self.chunks


class Verdict(NamedTuple):
    """What a sampled token means for a request with a constraint.

    ends    whether the answer is whole; the token belongs to it
    then    tokens that must follow, appended without being sampled
    error   why the request cannot go on
    """

    ends: bool = False
    then: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    tokens          one for each of `Plan.sampled`; negative where the model's logits are not finite
    logprobs        index into `tokens` -> one row, where asked for
    prompt_scores   request id -> one row for each of the chunk's targets, where asked for
    pooled          request id -> its vectors that the step has completed, where asked for
    verdicts        index into `tokens` -> what its request's constraint says, if it has one
    """

    tokens: Sequence[int]
    logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)
    prompt_scores: Mapping[str, LogprobRows] = field(default_factory=dict)
    pooled: Mapping[str, Vectors] = field(default_factory=dict)
    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
