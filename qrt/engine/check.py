"""Check a request before the engine takes it: token ids, parameters, priority, salt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qrt.arch.pooling import KINDS, Pooling
from qrt.checks import is_integer
from qrt.errors import ConfigError
from qrt.request.sampling import SamplingParams
from qrt.request.thinking import Thinking


class RequestCheck:
    """Checks requests for one engine. Each check raises ConfigError; any thread may call it.

    vocab_size    of the model
    eos           tokens that end the text
    priorities    whether requests may name one
    pooling       how the model pools; None: it generates
    """

    def __init__(
        self, vocab_size: int, eos: Collection[int], *, priorities: bool, pooling: Pooling | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = eos
        self._priorities = priorities
        self._pooling = pooling

    def tokens(self, prompt_ids: Sequence[int], params: SamplingParams) -> NDArray[np.int32]:
        """Check the token ids of the prompt and the parameters; return the prompt as int32 [P]."""
        ids, vocab = _array(prompt_ids), self._vocab_size
        for name, given in (
            ("prompt", ids),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", tuple(params.logit_bias)),
            ("bad_words", [t for word in params.bad_words if not isinstance(word, str) for t in word]),
        ):
            values = given if given is ids else np.array(given, object)
            wrong = values[(values < 0) | (values >= vocab)]
            if wrong.size:
                raise ConfigError(
                    f"{name}: expected token ids of 0 to {vocab - 1}, the model's vocabulary, got {wrong[0]}"
                )
        if any(isinstance(word, str) for word in params.bad_words):
            raise ConfigError("bad_words: expected token ids, got text; LLM and the server encode them")
        self._check_allowed(params)
        return ids.astype(np.int32)

    def _check_allowed(self, params: SamplingParams) -> None:
        """Raise ConfigError if the rules may leave no token to sample."""
        allowed = params.allowed_token_ids
        banned = {word[-1] for word in params.bad_words if isinstance(word, tuple)}
        if params.min_tokens:
            banned |= {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        if banned.issuperset(range(self._vocab_size) if allowed is None else allowed):
            left = "no token" if allowed is None else f"none of {list(allowed)[:8]}"
            raise ConfigError(
                "allowed_token_ids: expected a token that no other rule bans, but bad_words, or min_tokens "
                f"together with the stop tokens, may leave {left}; allow more tokens or ban fewer"
            )

    def job(self, pool: str | None) -> None:
        """Check that the model does what is asked: to generate (None), or to make vectors of a kind."""
        if pool is None and self._pooling is not None:
            raise ConfigError(
                f"prompt: expected a request to {self._pooling.task}, got one to generate; "
                "start the model with runner='generate' (--runner generate) if it has a head of a vocabulary"
            )
        if pool is not None and self._pooling is None:
            raise ConfigError(
                "prompt: expected a request to generate, got one for vectors; start the model with "
                "runner='pooling' (--runner pooling)"
            )
        if pool not in (None, *KINDS):
            raise ConfigError(f"pool: expected one of {', '.join(KINDS)}, got {pool!r}")

    def constraint(self, params: SamplingParams, thinking: Thinking | None, *, generate: bool) -> None:
        """Check the marks of thinking, and that a request with a shape generates."""
        if params.structured_outputs is not None and not generate:
            raise ConfigError(
                "structured_outputs: expected only where an answer is generated, got a prompt to score; "
                "leave it out"
            )
        if thinking is None:
            return
        ids = np.array((*thinking.start, *thinking.end, *thinking.closing), object)
        wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
        if wrong.size:
            raise ConfigError(
                f"thinking: expected token ids of 0 to {self._vocab_size - 1}, the model's vocabulary, got "
                f"{wrong[0]}"
            )

    def order(self, priority: object, cache_salt: object) -> None:
        """Check the priority and the salt of cached prefixes."""
        if not isinstance(priority, int):
            raise ConfigError(f"priority: expected an integer, got {priority!r}")
        if priority and not self._priorities:
            raise ConfigError(
                f"priority: expected 0, as requests run in the order they come, got {priority}; leave it "
                "out, or set scheduling_policy to 'priority' (--scheduling-policy priority)"
            )
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ConfigError(f"cache_salt: expected text, not empty, got {cache_salt!r}")


def _array(prompt_ids: Sequence[int]) -> NDArray[Any]:
    """Return token ids as an array; raise ConfigError if they are not a list of integers."""
    try:
        ids = np.asarray(prompt_ids)
    except ValueError:  # lists of different lengths
        ids = np.empty((0, 0), object)
    if ids.ndim == 1:
        if not ids.size or ids.dtype.kind in "iu":
            return ids
        if all(map(is_integer, prompt_ids)):  # beyond 64 bits
            return np.array(prompt_ids, object)
    raise ConfigError(f"prompt: expected a list of token ids, got {str(prompt_ids)[:50]}")
