"""Compute how many tokens of K/V fit into the memory that is left on the device."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from qrt.errors import ConfigError, UnsupportedError
from qrt.mem.slots import RUN
from qrt.mem.windows import LayerGroups, held_slots, step_room, step_slots
from qrt.quant.kv import KV_FORMATS, KVFormat

GIB = 1 << 30
# Bounds of the requests that run at once by default. More of them raise a GPU's rate only a little.
LEAST_SEQS, MOST_SEQS = 256, 1024
USUAL_TOKENS = 1024  # assumed length of a request, to estimate how many fit
TABLE_BYTES = 1 << 29  # largest request table by default
CPU_BUDGET_BYTES = 4 * GIB  # size of the pool on a CPU by default
PAD_SLOTS = 16  # slots after the pool: one takes the writes of padded rows; 16 keep strides aligned


@dataclass(frozen=True)
class PoolSize:
    """The size of a KV pool.

    num_slots       tokens that it holds, a multiple of the allocator's run
    num_bytes       memory that it takes, `PAD_SLOTS` included
    kv              its formats, e.g. "int8", or "fp16+int4" if layers differ
    max_model_len   most tokens of one request
    windows         the window groups, as (window, slots, bytes of one slot) each
    all_bytes       bytes of one token in the layers that keep all tokens
    """

    num_slots: int
    num_bytes: int
    kv: str
    max_model_len: int
    windows: tuple[tuple[int, int, int], ...] = ()
    all_bytes: int = 0

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of each group of layers."""
        return self.num_slots, *(slots for _, slots, _ in self.windows)

    def fitting(self, length: float) -> float:
        """Return how many requests of `length` tokens fit into the pool."""
        found = [self.num_slots / length]
        for window, slots, _ in self.windows:
            step = step_room(window, self.max_model_len, slots)
            found.append((slots - step) / held_slots(window, math.ceil(length)))
        return min(found)

    @property
    def concurrency(self) -> float:
        """How many requests of full length fit into the pool."""
        return self.fitting(self.max_model_len)

    def __str__(self) -> str:
        """Return the line that is logged at start."""
        return (
            f"KV pool: {self.num_slots:,} tokens, {self.concurrency:.1f}x concurrent requests of "
            f"{self.max_model_len:,} tokens, {self.num_bytes / GIB:.2f} GiB as {self.kv}{self.about_windows}"
        )

    @property
    def about_windows(self) -> str:
        """What layers with windows keep, for the lines at start; empty if there are none."""
        if not self.windows:
            return ""
        groups = [
            f"{per:,} bytes of each of the last {held_slots(window, self.max_model_len):,} tokens, in "
            f"{slots:,} slots (window {window:,})"
            for window, slots, per in self.windows
        ]
        return f"; a request keeps {self.all_bytes:,} bytes of every token and {', and '.join(groups)}"


def slot_bytes(formats: Sequence[KVFormat], num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's K and V in all layers."""
    return sum(format.bytes_per_slot(num_kv_heads, head_dim, dtype) for format in formats)


def pool_bytes(
    formats: Sequence[KVFormat], num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes of the tensors for `num_slots` slots and `PAD_SLOTS`; `formats` [layers]."""
    return (num_slots + PAD_SLOTS) * slot_bytes(formats, num_kv_heads, head_dim, dtype)


def kv_budget_bytes(
    device: torch.device,
    *,
    gpu_memory_utilization: float,
    reserve_bytes: int,
    kv_cache_memory_bytes: int | None = None,
) -> int:
    """Return the bytes that the KV pool may take on `device`; call it after the weights are loaded.

    It is `kv_cache_memory_bytes` if given. Else, on a CPU, it is 4 GiB. On a GPU it is the share
    `gpu_memory_utilization` of its memory, less what any process has in use, less `reserve_bytes` for the
    activations of one step and for graphs. Raises ConfigError when nothing is left.
    """
    if kv_cache_memory_bytes is not None:
        return kv_cache_memory_bytes
    if device.type != "cuda":
        return CPU_BUDGET_BYTES
    torch.cuda.empty_cache()  # blocks that loading left in torch's cache are free for the pool
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * gpu_memory_utilization) - (total - free) - reserve_bytes
    if budget <= 0:
        raise ConfigError(
            f"no memory left for the KV pool: {(total - free) / GIB:.2f} GiB in use and "
            f"{reserve_bytes / GIB:.2f} GiB reserved for activations, of {total / GIB:.2f} GiB x "
            f"--gpu-memory-utilization {gpu_memory_utilization}; raise it, lower --max-num-batched-tokens, "
            "stop other programs on the GPU, or use a quantized checkpoint or a GPU with more memory"
        )
    return budget


def default_num_seqs(budget_bytes: int, slot_bytes: int, max_model_len: int, groups: int = 1) -> int:
    """Return how many requests a GPU runs at once by default, a power of two.

    It is between LEAST_SEQS and MOST_SEQS: as many requests of USUAL_TOKENS tokens (or `max_model_len` if
    that is less) as fit into `budget_bytes`, at `slot_bytes` per token. The request table, with 4 bytes for
    each token that a request may have in each of the `groups` of layers, takes at most TABLE_BYTES.
    """
    fitting = budget_bytes // (slot_bytes * min(USUAL_TOKENS, max_model_len))
    fitting = min(fitting, TABLE_BYTES // (4 * max_model_len * groups), MOST_SEQS)
    return max(LEAST_SEQS, 1 << max(fitting, 1).bit_length() - 1)


class _Layout(NamedTuple):
    """The window of each group of layers, 0 for all tokens, and the bytes of one slot in it."""

    windows: Sequence[int]
    per_slot: Sequence[int]

    def needed(self, requests: int, length: int) -> list[int]:
        """Return the slots that `requests` requests of `length` tokens can use, in whole runs.

        In a window group all of them decode, and one of them also has the tokens of a step.
        """
        found = []
        for window in self.windows:
            each = held_slots(window, length)
            slots = requests * each + step_slots(window, length)
            found.append(-(-slots // RUN) * RUN)
        return found

    def num_bytes(self, slots: Sequence[int]) -> int:
        """Return the bytes of the tensors for so many slots in each group, and `PAD_SLOTS`."""
        return sum((n + PAD_SLOTS) * per for n, per in zip(slots, self.per_slot, strict=True))


def pool_size(
    formats: Sequence[KVFormat],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    budget_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    groups: LayerGroups | None = None,
) -> PoolSize:
    """Return the largest pool within `budget_bytes` that `max_num_seqs` requests of full length can use.

    `formats` [layers]; `dtype` is the model's. Groups of layers get equal shares of the memory, but none less
    than one request needs or more than all requests can use. So of requests of any length, a pool of two
    groups holds about half as many as the best division does, or more. Raises ConfigError when one request of
    `max_model_len` tokens does not fit.
    """
    groups = groups or LayerGroups.of([0] * len(formats), max_model_len)

    def layout(formats: Sequence[KVFormat]) -> _Layout:
        per_slot = [0] * len(groups.windows)
        for format, group in zip(formats, groups.of_layer, strict=True):
            per_slot[group] += format.bytes_per_slot(num_kv_heads, head_dim, dtype)
        return _Layout(groups.windows, per_slot)

    own, kv = layout(formats), "+".join(dict.fromkeys(format.name for format in formats))
    least, most = own.needed(1, max_model_len), own.needed(max_num_seqs, max_model_len)
    if own.num_bytes(least) > budget_bytes:
        fitting = _longest(own, budget_bytes, max_model_len)
        remedies = [f"lower --max-model-len to {fitting}"] if fitting else []
        for name in KV_FORMATS:
            try:
                takes = layout([KV_FORMATS[name]] * len(formats)).num_bytes(least)
            except UnsupportedError:  # the format does not take heads of this size
                continue
            if takes <= budget_bytes:
                remedies.append(f"choose --kv {name}")
        remedies.append(f"raise --kv-cache-memory-bytes to {own.num_bytes(least)}")
        raise ConfigError(
            f"KV pool: {budget_bytes / GIB:.2f} GiB hold {fitting} tokens as {kv} (each "
            f"{sum(own.per_slot)} bytes), fewer than one request of {max_model_len} tokens; "
            f"{', '.join(remedies)} or, on a GPU, raise --gpu-memory-utilization"
        )
    slots = _divided(budget_bytes - PAD_SLOTS * sum(own.per_slot), own.per_slot, least, most)
    if not own.per_slot[0]:  # all layers have windows: as many tokens as the requests that fit can have
        own_slots = zip(slots[1:], own.windows[1:], strict=True)
        fits = min(n * max_model_len // held_slots(window, max_model_len) for n, window in own_slots)
        slots[0] = min(most[0], -(-max(fits, max_model_len) // RUN) * RUN)
    windows = zip(own.windows[1:], slots[1:], own.per_slot[1:], strict=True)
    return PoolSize(slots[0], own.num_bytes(slots), kv, max_model_len, tuple(windows), own.per_slot[0])


def _longest(layout: _Layout, budget_bytes: int, most: int) -> int:
    """Return the longest request, in whole runs and at most `most` tokens, that `budget_bytes` hold."""
    lengths = range(0, most + 1, RUN)
    fits = bisect_right(lengths, budget_bytes, key=lambda n: layout.num_bytes(layout.needed(1, n)))
    return lengths[max(0, fits - 1)]


def _divided(
    budget_bytes: int, per_slot: Sequence[int], least: Sequence[int], most: Sequence[int]
) -> list[int]:
    """Return the slots of each group within `budget_bytes`: equal bytes, between `least` and `most`."""

    def slots(share: int) -> list[int]:
        found = [share // per // RUN * RUN if per else high for per, high in zip(per_slot, most, strict=True)]
        return [min(max(n, low), high) for n, low, high in zip(found, least, most, strict=True)]

    def taken(share: int) -> int:
        return sum(n * per for n, per in zip(slots(share), per_slot, strict=True))

    return slots(bisect_right(range(budget_bytes + 1), budget_bytes, key=taken) - 1)
