"""Thinking: where the thinking of an answer begins and ends, in token ids."""

from __future__ import annotations

from dataclasses import dataclass

from qrt.checks import at_least
from qrt.errors import ConfigError


@dataclass(frozen=True)
class Thinking:
    """How the engine finds the end of an answer's thinking.

    A grammar begins behind it, and a budget limits its tokens. Before the first token of the answer the model
    either thinks already (`inside`) or may begin to, with `start`.

    end       the tokens that end the thinking
    start     the tokens that begin it; () if the answer never begins it by itself
    inside    whether the prompt has begun it
    budget    the most tokens of thinking, `start` and `end` not counted; None: no limit
    closing   the tokens that are appended when the budget is spent; they end with `end`
    """

    end: tuple[int, ...]
    start: tuple[int, ...] = ()
    inside: bool = False
    budget: int | None = None
    closing: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("end", "start", "closing"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.end:
            raise ConfigError("thinking: expected the tokens that end it, got none")
        if self.budget is not None:
            at_least("thinking_token_budget", self.budget, 0)
            if self.closing[-len(self.end) :] != self.end:
                raise ConfigError("thinking: expected closing tokens that end with those of its end")
