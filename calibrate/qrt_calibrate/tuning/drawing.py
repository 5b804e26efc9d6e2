"""The text that training reads: windows that the original model writes, and parts of the calibration text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

PROMPT = 8  # tokens of the calibration text that a drawn window begins with


def cut_windows(windows: Tensor, count: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield batches [count, length] cut from random places of the calibration text [B, T], without end."""
    generator = torch.Generator(windows.device).manual_seed(seed)
    while True:
        rows, starts = _integers((len(windows), windows.shape[1] - length + 1), count, generator)
        yield windows[rows[:, None], starts[:, None] + torch.arange(length, device=windows.device)]


def _integers(bounds: tuple[int, ...], count: int, generator: torch.Generator) -> list[Tensor]:
    """Return, for each of `bounds`, [count] random integers from 0 up to but not including it."""
    device = generator.device
    return [torch.randint(bound, (count,), generator=generator, device=device) for bound in bounds]


def drawn_windows(
    model: PreTrainedModel, windows: Tensor, length: int, seed: int, together: int
) -> Iterator[Tensor]:
    """Yield batches [together, length] of text that `model` writes, always new, without end."""
    generator = torch.Generator(windows.device).manual_seed(seed)
    prompt = min(PROMPT, length - 1)
    while True:
        rows, starts = _integers((len(windows), windows.shape[1] - prompt), together, generator)
        at = starts[:, None] + torch.arange(prompt, device=windows.device)
        yield _continued(model, windows[rows[:, None], at], length, generator)


@torch.no_grad()
def _continued(model: PreTrainedModel, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Continue prompts [B, P] to [B, length]; each next token is drawn from the model's predictions."""
    cache = Cache(layers=[_PreallocatedLayer(length) for _ in range(model.config.num_hidden_layers)])
    found, ids = prompts, prompts
    while found.shape[1] < length:
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
        found = torch.cat([found, ids], 1)
    return found


class _PreallocatedLayer(DynamicLayer):
    """A layer's cache with memory for `length` tokens, so that a new token does not copy the earlier ones."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        batch, heads, _, width = key_states.shape
        self._kv = key_states.new_empty(2, batch, heads, self._length, width)
        self.keys, self.values = self._kv[:, :, :, :0]

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        self._kv[0, :, :, begin:end], self._kv[1, :, :, begin:end] = key_states, value_states
        self.keys, self.values = keys, values = self._kv[:, :, :, :end]
        return keys, values
