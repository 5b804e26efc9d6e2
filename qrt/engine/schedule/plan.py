"""Plan: one step as the scheduler decided it, and what came of it. Immutable, on the host.

A plan repeats everything the step needs, so that it stays true while the scheduler moves on: the next plan is
made before the tokens of this one are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from qrt.engine.schedule.scores import Scores
from qrt.mem.slots import Ints
from qrt.sampling_params import SamplingParams

ANY = -1  # of `Ban.after`: whatever came before


class Ban(NamedTuple):
    """A token that must not be drawn, if the token before it is `after`."""

    token: int
    after: int = ANY


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What of a request's parameters changes its logits by what it has seen, or is given as a list.

    bias         token id -> value added
    allowed      no other tokens; None: all
    repetition, presence, frequency   the penalties
    growth       (tokens known from which EOS grows likelier, factor a token); None: never
    """

    bias: Mapping[int, float]
    allowed: tuple[int, ...] | None
    repetition: float
    presence: float
    frequency: float
    growth: tuple[int, float] | None

    @classmethod
    def of(cls, params: SamplingParams, prompt_len: int) -> Adjustment | None:
        """None when nothing is asked for."""
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
    """How the tokens of one request are drawn. temperature 0: greedy; top_k 0, top_p 1, min_p 0: off.

    plain   whether temperature and seed say all; it is asked of each request in each step
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
        """Settle a request's parameters."""
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
        """Whether tokens are left out before drawing."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class Admission(NamedTuple):
    """A request that has got a row of the request table, with the tokens it has so far."""

    row: int
    sampling: SamplingRules
    prompt: Ints
    output: Sequence[int] = ()


class Placement(NamedTuple):
    """New slots int32 [n] of a request, of positions [start, start + n)."""

    row: int
    start: int
    slots: Ints


class Decode(NamedTuple):
    """A request that computes the token it sampled last and samples the next one; where, its row knows."""

    request_id: str
    row: int
    sampling: SamplingRules
    banned: tuple[Ban, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log-probabilities wanted of `targets` int32 [n], which follow a chunk's tokens [first, first + n);
    the `num_top` likeliest tokens of each place are named too."""

    first: int
    targets: Ints
    num_top: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of a request, int32 [n], computed at positions [start, start + n).

    samples   whether these are its last known tokens, so that the next one is sampled
    """

    request_id: str
    row: int
    start: int
    tokens: Ints
    samples: bool
    sampling: SamplingRules
    banned: tuple[Ban, ...] = ()
    scoring: Scoring | None = None

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Plan:
    """One step: new rows and slots, then all decodes, and chunks of prefill."""

    admitted: tuple[Admission, ...]
    placed: tuple[Placement, ...]
    decodes: tuple[Decode, ...]
    chunks: tuple[Chunk, ...]

    @cached_property
    def sampled(self) -> tuple[Decode | Chunk, ...]:
        """What samples a token, in the order of `StepResult.tokens`."""
        return self.decodes + tuple(chunk for chunk in self.chunks if chunk.samples)

    @cached_property
    def sampled_at(self) -> Sequence[int]:
        """Which of the step's tokens each of `sampled` comes behind."""
        at, ends = len(self.decodes), []
        for chunk in self.chunks:
            at += len(chunk.tokens)
            if chunk.samples:
                ends.append(at - 1)
        return [*range(len(self.decodes)), *ends]

    @property
    def works(self) -> tuple[Decode | Chunk, ...]:
        """All that is computed, a request each."""
        return self.decodes + self.chunks


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    tokens          one for each of `Plan.sampled`
    logprobs        by index into `tokens`, where asked for: one row
    prompt_scores   by request id, where asked for: one row for each of the chunk's targets
    """

    tokens: Sequence[int]
    logprobs: Mapping[int, Scores] = field(default_factory=dict)
    prompt_scores: Mapping[str, Scores] = field(default_factory=dict)
