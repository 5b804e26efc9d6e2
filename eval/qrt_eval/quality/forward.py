"""Run prompts through a loaded model to its final hidden states, with K and V read back from the cache.

Some evaluators need whole distributions, which the engine never returns. A hidden state takes some kilobytes;
the logits of a 128k vocabulary take half a megabyte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from qrt.arch.rope import rope_offset
from qrt.errors import ConfigError
from qrt.kernels.step import Chunks, KVPlaces, PrefillMeta, StepMeta
from qrt.offline.llm import LLM

CHUNK_TOKENS = 2048  # tokens of a step; attention reads the earlier ones from the cache


class PromptReader:
    """Run one prompt at a time through the idle engine of `llm`.

    The reader uses all of the engine's slots, so prefix caching must be off.
    """

    def __init__(self, llm: LLM, chunk_tokens: int = CHUNK_TOKENS) -> None:
        assert not llm.engine.config.enable_prefix_caching, "the reader would overwrite the prefix cache"
        self.model = llm.engine.model
        self._kv = llm.engine.runner.kv
        self._slots = torch.arange(self._kv.num_slots, dtype=torch.int32, device=self.model.device)
        # a window group has fewer slots, which the prompt goes through again and again
        self._rings = [self._slots % slots for slots in self._kv.slots[1:]]
        reach = [slots - window + 1 for window, slots, _ in llm.engine.pool.windows]
        self._chunk_tokens = min([chunk_tokens, *reach])

    @torch.inference_mode()
    def hidden(self, ids: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield the final hidden states of `ids` after the norm, [n, H], a chunk at a time."""
        if len(ids) > len(self._slots):
            raise ConfigError(
                f"window: expected at most {len(self._slots)} tokens, as the KV pool holds, got {len(ids)}"
            )
        tokens = torch.tensor(ids, device=self.model.device)
        for start in range(0, len(ids), self._chunk_tokens):
            end = min(start + self._chunk_tokens, len(ids))
            yield self.model.hidden(self._step(tokens, start, end), self._kv)

    def _step(self, tokens: Tensor, start: int, end: int) -> StepMeta:
        """Return a prefill chunk of positions [start, end) that attends to all of [0, end) in the cache."""
        chunk = Chunks([0], [end - start], [start], self.model.queries, attend_cache=True)
        prefill = PrefillMeta.of(chunk, self.model.device)  # request 0 has its position p in slot p
        positions = self._slots[start:end]
        rope_positions = positions + rope_offset(len(tokens), self.model.arch.long_rope_switch)
        windows = [KVPlaces(ring[start:end], ring[None]) for ring in self._rings]
        step = StepMeta(tokens[start:end], positions, positions, self._slots[None], None, prefill)
        return replace(step, rope_positions=rope_positions, windows=windows)


def scored_states(reader: PromptReader, ids: tuple[int, ...], first: int) -> Tensor:
    """Return the states that predict tokens `first`.. of `ids`: [len(ids) - first, H] in host memory."""
    parts, start = [], 0
    for states in reader.hidden(ids[:-1]):
        skipped = max(0, first - 1 - start)
        start += len(states)
        parts.append(states[skipped:].cpu())
    return torch.cat(parts)
