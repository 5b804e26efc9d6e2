"""Limits: the caps on requests and steps."""

from __future__ import annotations

from dataclasses import dataclass

from qrt.errors import ConfigError, ContextLengthError

# Most cached tokens before the chunks of one step, all together, unless one context is longer. Prefill copies
# the K and V of these tokens into memory of its own.
CACHED_TOKENS = 1 << 16


@dataclass(frozen=True)
class Limits:
    """The caps of `EngineConfig`, resolved, and what the model and the machine set.

    step_sizes      sorted sizes to which steps with prompts are padded
    long_rope_switch  as in `Arch`: longer requests use other RoPE tables
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    step_sizes: tuple[int, ...] = ()
    long_rope_switch: int = 0

    @property
    def max_cached_tokens(self) -> int:
        """The most cached tokens before the chunks of one step."""
        return max(self.max_model_len, CACHED_TOKENS)

    def end(self, prompt_len: int, max_tokens: int | None, pool: int, *, whole: bool = False) -> int:
        """Return the length in tokens at which a request ends, in a KV pool of `pool` slots.

        Raises ConfigError when the prompt and one output token do not fit. A prompt that is only scored
        (`max_tokens` 0) needs one slot less: nothing is predicted from its last token, unless it is computed
        too (`whole`).
        """
        if not prompt_len:
            raise ConfigError("prompt: expected at least one token, got none")
        first = 1 if max_tokens != 0 else 0 if whole else -1
        for name, limit in (("max_model_len", self.max_model_len), ("KV pool", pool)):
            if prompt_len + first > limit:
                raise ContextLengthError("prompt", prompt_len, limit - first, limit, name)
        most = min(self.max_model_len, pool)
        if max_tokens == 0:
            return prompt_len
        return most if max_tokens is None else min(prompt_len + max_tokens, most)
