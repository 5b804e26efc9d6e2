"""Slots of layers that slide a window: who holds each, so that requests free what their window has passed.

Layers that attend equally far back are a *group*. Group 0 keeps every token of a request. The others have a
pool of their own, and a request keeps the last tokens there alone. Running requests may hold the same slot,
and so may the prefix cache: a slot is free when nobody does. Integers only; the bytes are in `storage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qrt.mem.slots import RUN, Ints, SlotAllocator

# Tokens that a request keeps beyond its window. Kernels read whole tiles of keys (at most 128), and a prefix
# that ends a little before the newest token is found in the cache, too.
MARGIN = 128
AHEAD = 64  # most tokens that are neither in the window nor in MARGIN: slots ahead, and not yet freed
STEP_TOKENS = 2048  # tokens of a step for which a group has room beside what decoding requests hold
NONE = -1  # in place of a slot: the token has none


def held_slots(window: int, length: int) -> int:
    """Return the most slots of a group that a request of `length` tokens holds while it decodes."""
    return min(length, window + MARGIN + AHEAD) if window else length


def step_slots(window: int, length: int) -> int:
    """Return the slots for a step with a prompt of at most `length` tokens, beside `held_slots`."""
    return min(STEP_TOKENS, length - held_slots(window, length))


def step_room(window: int, length: int, capacity: int) -> int:
    """Return how many of `capacity` slots admission leaves for steps: `step_slots`, at most an eighth."""
    return min(step_slots(window, length), capacity // 8)


@dataclass(frozen=True)
class LayerGroups:
    """The groups of a model's layers.

    windows    of each group in tokens; the first is 0: all tokens
    of_layer   the group of each layer; group 0 may have none
    """

    windows: tuple[int, ...]
    of_layer: tuple[int, ...]

    @classmethod
    def of(cls, windows: Sequence[int], max_model_len: int) -> LayerGroups:
        """Group layers by their `windows`, of which 0 is all tokens.

        Windows that free nothing before a request has `max_model_len` tokens count as 0.
        """
        useful = [w if held_slots(w, max_model_len) < max_model_len else 0 for w in windows]
        groups = (0, *sorted({w for w in useful if w}))
        return cls(groups, tuple(groups.index(w) for w in useful))


class Held:
    """The slots of one request in one group: int32 `slots`, of the positions from `first` on."""

    __slots__ = ("first", "slots")

    def __init__(self, first: int, slots: Ints) -> None:
        self.first = first
        self.slots = slots

    @property
    def end(self) -> int:
        """The position after the last one with a slot."""
        return self.first + len(self.slots)


class Given(NamedTuple):
    """New slots int32 [n] of a request in a group, of the positions from `start` on."""

    group: int
    start: int
    slots: Ints


class WindowSlots:
    """The slots of one group: each is free, or held by requests, by the prefix cache, or by both.

    kept    tokens before its next one whose slots a request keeps
    """

    def __init__(self, capacity: int, window: int, run: int = RUN) -> None:
        self.capacity = capacity
        self.window = window
        self.kept = window + MARGIN
        self.evictable = 0  # slots that the prefix cache alone holds
        self._slots = SlotAllocator(capacity, run)
        self._holders = np.zeros(capacity, np.int32)  # running requests that hold a slot
        self._cached = np.zeros(capacity, np.bool_)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return self._slots.num_free

    @property
    def available(self) -> int:
        """Slots that can be taken now: free ones, and those that the prefix cache alone holds."""
        return self._slots.num_free + self.evictable

    def take(self, n: int, tail: int | None) -> Ints:
        """Return `n` free slots for a request; the caller knows that they are free."""
        slots = self._slots.alloc(n, tail)
        assert slots is not None, "slots of a window that are not free"
        self._holders[slots] = 1
        return slots

    def hold(self, slots: Ints) -> None:
        """Add a request that holds `slots`, which somebody holds already."""
        self.evictable -= int(np.count_nonzero(self.unheld(slots)))
        self._holders[slots] += 1

    def drop(self, slots: Ints) -> None:
        """Undo `take` or `hold` of one request; a slot that nobody holds any more is free."""
        self._holders[slots] -= 1
        left = slots[self._holders[slots] == 0]
        cached = self._cached[left]
        self.evictable += int(np.count_nonzero(cached))
        self._slots.free(left[~cached])

    def cache(self, slots: Ints) -> None:
        """Let the prefix cache hold `slots`, which a request holds."""
        self._cached[slots] = True

    def uncache(self, slots: Ints) -> None:
        """Undo `cache`; a slot that nobody holds any more is free."""
        self._cached[slots] = False
        left = slots[self._holders[slots] == 0]
        self.evictable -= len(left)
        self._slots.free(left)

    def unheld(self, slots: Ints) -> NDArray[np.bool_]:
        """Return which of `slots` no request holds, bool [n]."""
        return self._holders[slots] == 0

    def check(self, held: Sequence[Ints], cached: Sequence[Ints]) -> None:
        """Assert that requests hold `held` and the cache `cached`, and nobody anything else."""
        self._slots.check()
        holders, own = np.zeros(self.capacity, np.int32), np.zeros(self.capacity, np.int32)
        for slots in held:
            np.add.at(holders, slots, 1)
        for slots in cached:
            np.add.at(own, slots, 1)
        assert np.array_equal(holders, self._holders), "a slot of a window with other holders than noted"
        assert own.max(initial=0) <= 1 and np.array_equal(own > 0, self._cached), "a slot cached twice or not"
        assert np.array_equal(np.flatnonzero((holders > 0) | (own > 0)), self._slots.in_use())
        assert self.evictable == np.count_nonzero((holders == 0) & (own > 0))


def longest_prefix(found: Sequence[Ints], windows: Sequence[int], length: int) -> int:
    """Return the most of `length` cached tokens after which a token finds all that it attends.

    found     for each window, the slots int32 [length] of the tokens, or NONE
    """
    usable = np.ones(length + 1, np.bool_)
    counts = np.arange(1, length + 1)
    for slots, window in zip(found, windows, strict=True):
        last_gap = np.maximum.accumulate(np.where(slots == NONE, counts, 0))
        usable[1:] &= counts - last_gap >= np.minimum(counts, window - 1)
    return int(np.flatnonzero(usable)[-1])
