"""Prompts through a loaded model to its final hidden states, K and V read back from the cache.

For evaluators that need whole distributions, which the engine never hands out: a hidden state is some
kilobytes where the logits of a 128k vocabulary are half a megabyte.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qrt.errors import ConfigError
from qrt.kernels.step import Chunks, PrefillMeta, StepMeta
from qrt.llm import LLM

CHUNK_TOKENS = 2048  # of a step; attention reads what came before from the cache


class PromptReader:
    """One prompt at a time through the idle engine of `llm`, whose slots it uses as if they were its own
    (prefix caching must be off)."""

    def __init__(self, llm: LLM, chunk_tokens: int = CHUNK_TOKENS) -> None:
        assert not llm.engine.config.enable_prefix_caching, "the reader writes to slots of the prefix cache"
        self.model = llm.engine.model
        self._kv = llm.engine.runner.kv
        self._chunk_tokens = chunk_tokens
        self._slots = torch.arange(self._kv.num_slots, dtype=torch.int32, device=self.model.device)

    @torch.inference_mode()
    def hidden(self, ids: tuple[int, ...]) -> Iterator[Tensor]:
        """Final hidden states (after the norm) of `ids`, [n, H] in the model's dtype, chunk after chunk."""
        if len(ids) > len(self._slots):
            raise ConfigError(
                f"window of {len(ids)} tokens: wanted at most {len(self._slots)}, the KV pool's"
            )
        tokens = torch.tensor(ids, device=self.model.device)
        for start in range(0, len(ids), self._chunk_tokens):
            end = min(start + self._chunk_tokens, len(ids))
            yield self.model.hidden(self._step(tokens, start, end), self._kv)

    def _step(self, tokens: Tensor, start: int, end: int) -> StepMeta:
        """Positions [start, end) as a prefill chunk that attends all of [0, end) through the cache."""
        chunk = Chunks([0], [end - start], [start], self.model.queries, attend_cache=True)
        prefill = PrefillMeta.of(chunk, self.model.device)  # of request 0, whose position p is in slot p
        positions = self._slots[start:end]
        return StepMeta(tokens[start:end], positions, positions, self._slots[None], None, prefill)


def scored_states(reader: PromptReader, ids: tuple[int, ...], first: int) -> Tensor:
    """The states that predict tokens `first`.. of `ids`: [len(ids) - first, H] in host memory."""
    parts, start = [], 0
    for states in reader.hidden(ids[:-1]):
        skipped = max(0, first - 1 - start)
        start += len(states)
        parts.append(states[skipped:].cpu())
    return torch.cat(parts)
