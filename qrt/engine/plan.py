"""Plan: one step as the scheduler decided it, and what came of it. Immutable, on the host.

A plan repeats everything the step needs, so that it stays true while the scheduler moves on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from qrt.engine.logprobs import Scores
from qrt.mem.slots import Ints


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are drawn. temperature 0: greedy; top_k 0, top_p 1: off."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    num_logprobs: int | None

    @property
    def filtered(self) -> bool:
        """Whether tokens are left out before drawing."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


class Decode(NamedTuple):
    """A request that computes the token it sampled last, at `position`, and samples the next one."""

    request_id: str
    row: int
    position: int
    slot: int
    sampling: Sampling
    banned: tuple[int, ...]


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

    slots     int32 [m >= n], of positions [start + n - m, start + n): more than n when the request has just
              been started and its first positions come from the prefix cache
    samples   whether these are its last known tokens, so that the next one is sampled
    """

    request_id: str
    row: int
    start: int
    tokens: Ints
    slots: Ints
    samples: bool
    sampling: Sampling
    banned: tuple[int, ...]
    scoring: Scoring | None

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Plan:
    """One step: the requests that have got a row of the request table, all decodes, and chunks of prefill."""

    admitted: tuple[tuple[int, Sampling], ...]
    decodes: tuple[Decode, ...]
    chunks: tuple[Chunk, ...]

    @cached_property
    def sampled(self) -> tuple[Decode | Chunk, ...]:
        """What samples a token, in the order of `StepResult.tokens`."""
        return self.decodes + tuple(chunk for chunk in self.chunks if chunk.samples)

    @property
    def request_ids(self) -> list[str]:
        """The requests that take part."""
        works: tuple[Decode | Chunk, ...] = self.decodes + self.chunks
        return [work.request_id for work in works]


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
