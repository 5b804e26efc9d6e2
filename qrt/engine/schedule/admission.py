"""Decide whether the pool has room for one more request, by the most slots that all will hold at once.

This is LightLLM's estimate (https://github.com/ModelTC/lightllm, "efficient router"). A request returns its
slots when it ends, so all together need fewer than the sum of their ends. Sort the requests by the tokens
that each still has to generate. The use of slots can only peak when one of them ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qrt.engine.schedule.request import ALL, Request
from qrt.mem.windows import WindowSlots, held_slots, step_room

Counts = NDArray[np.int64]

# An output is expected to reach EXPECTED_TOKENS; a longer one, EXPECTED_GROWTH times its length so far. Its
# maximum is a limit for both.
EXPECTED_TOKENS = 1024
EXPECTED_GROWTH = 1.1


class Growing:
    """Slots that running requests hold and are expected to need; new requests join the estimate.

    prefill   prompt tokens that must still be computed, of all of them
    """

    def __init__(
        self, running: Sequence[Request], windows: Sequence[WindowSlots] = (), *, conservative: bool
    ) -> None:
        """Start with the running requests; `conservative` expects each to reach its maximum length."""
        self._conservative = conservative
        self._windows = windows
        length, slots = _counts(running, "length"), _counts(running, "seq.length")
        cached = _counts(running, "seq.num_cached")
        left = np.maximum(self._expected(running), slots - length)
        self._held_in_windows = [_held(pool, length + left) for pool in windows]
        order = np.argsort(left)  # the first to end comes first
        self._held, self._left = (length - cached)[order], left[order]
        self._slots = int((slots - cached).sum())  # includes slots given ahead, so it may exceed `_held`
        self._most = int(self._held.sum() + left.sum())  # if all grew and none ended before the others
        self.prefill = sum(
            [r.prefill_len - r.num_computed for r in running if r.num_computed < r.prefill_len]
        )

    def add(self, request: Request, need: int) -> None:
        """Add a request that is not yet running and has `need` tokens to compute."""
        left = int(self._expected([request])[0])
        index = int(self._left.searchsorted(left))
        self._left = np.concatenate((self._left[:index], (left,), self._left[index:]))
        self._held = np.concatenate((self._held[:index], (need,), self._held[index:]))
        self._slots += need
        lengths = np.array([request.length + left])
        for group, pool in enumerate(self._windows):
            self._held_in_windows[group] += _held(pool, lengths)
        self._most += need + left
        self.prefill += need

    def spare(self, slack: int, plenty: int) -> int:
        """Return how many free slots the requests need to grow; `slack` is that of `peak_slots`.

        A cheap upper bound is returned instead where it is at most `plenty`.
        """
        if (most := self._most + slack * len(self._left) - self._slots) <= plenty:
            return most
        return _peak(self._held[::-1], self._left[::-1], slack) - self._slots

    def fits_windows(self, max_model_len: int) -> bool:
        """Return whether window groups hold what all requests are expected to keep there at their ends.

        Beside that they need room for a step with a prompt.
        """
        return all(
            held + step_room(pool.window, max_model_len, pool.capacity) <= pool.capacity
            for held, pool in zip(self._held_in_windows, self._windows, strict=True)
        )

    def _expected(self, requests: Sequence[Request]) -> Counts:
        """Return how many more tokens each request is expected to generate, int64 [n]."""
        prompt = _counts(requests, "prompt_len")
        done, most = _counts(requests, "length") - prompt, _counts(requests, "max_len") - prompt
        known = self._conservative or _counts(requests, "params.ignore_eos").astype(bool)
        return np.maximum(expected_output(done, most, conservative=known) - done, 0)


def peak_slots(held: ArrayLike, left: ArrayLike, slack: int = 0) -> int:
    """Return the most slots that n requests hold at once.

    They hold `held` [n] now, take one more per step for `left` [n] steps, and then end. `slack` is the number
    of steps by which each may be late, plus the slots that each may have ahead.
    """
    held, left = np.asarray(held, np.int64), np.asarray(left, np.int64)
    order = np.argsort(-left, kind="stable")
    return _peak(held[order], left[order], slack)


def _peak(held: Counts, left: Counts, slack: int) -> int:
    """Return `peak_slots` of requests that are sorted by `left`, the largest first."""
    grown = left + slack  # what the requests before the k-th have grown by when it ends, at most
    longer = len(left) - left[::-1].searchsorted(grown)  # how many requests can grow by that much
    total = np.zeros(len(left) + 1, np.int64)
    left.cumsum(out=total[1:])
    return int((held.cumsum() + longer * grown + total[1:] - total[longer]).max(initial=0))


def expected_output(num_output: ArrayLike, most: ArrayLike, *, conservative: ArrayLike) -> Counts:
    """Return the expected final output length of each request, at most `most`."""
    longer = np.maximum(EXPECTED_TOKENS, (EXPECTED_GROWTH * np.asarray(num_output)).astype(np.int64))
    return np.where(conservative, most, np.minimum(most, longer))


def _held(pool: WindowSlots, lengths: Counts) -> int:
    """Return the slots of a window group that requests of `lengths` [n] hold together."""
    return int(np.minimum(lengths, held_slots(pool.window, ALL)).sum())


def _counts(requests: Sequence[Request], name: str) -> Counts:
    """Return the attribute `name` of each request, int64 [n]."""
    return np.fromiter(map(attrgetter(name), requests), np.int64, len(requests))
