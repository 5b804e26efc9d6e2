"""Request: what the scheduler knows of one generation. Only the scheduler edits it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from qrt.config import SamplingParams
from qrt.engine.plan import Sampling
from qrt.mem.manager import SequenceKV
from qrt.mem.slots import Ints


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's and vLLM's words."""

    STOP = "stop"  # end-of-text or stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # by the caller, or by an error in a step


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and what has been generated for it.

    prompt        int32 [P]
    output        tokens sampled so far
    stop_ids      tokens that end it, not one of them before `params.min_tokens` outputs
    max_len       tokens, prompt and output together, at which it ends; P for a request that only scores
    seq, row      its slots and its row of the request table; None while it waits
    num_computed  its first tokens, whose K/V are written
    prefill_len   tokens it was (re)started with: it decodes once they are computed
    num_scored    tokens after the first whose log-probability has been handed out
    num_cached    tokens found in the prefix cache when it first ran
    """

    id: str
    prompt: Ints
    params: SamplingParams
    sampling: Sampling
    stop_ids: frozenset[int]
    max_len: int
    output: list[int] = field(default_factory=list)
    seq: SequenceKV | None = None
    row: int = -1
    num_computed: int = 0
    prefill_len: int = 0
    num_scored: int = 0
    num_cached: int | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def ids(self) -> Ints:
        """All its tokens, int32 [len]."""
        return (
            np.concatenate([self.prompt, np.asarray(self.output, np.int32)]) if self.output else self.prompt
        )

    @property
    def generates(self) -> bool:
        """Whether tokens are to be sampled at all."""
        return self.max_len > len(self.prompt)

    @property
    def decoding(self) -> bool:
        """Whether its next step computes one token, the one sampled last."""
        return self.num_computed >= self.prefill_len

    @property
    def scoring(self) -> bool:
        """Whether prompt tokens still wait for their log-probability."""
        return self.params.prompt_logprobs is not None and self.num_scored < len(self.prompt) - 1

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that must not be drawn next."""
        return tuple(self.stop_ids) if len(self.output) < self.params.min_tokens else ()
