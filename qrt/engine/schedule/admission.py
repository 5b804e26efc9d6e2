"""Admission: whether the pool has room for one more request, by the peak of what all will hold.

LightLLM's estimate (https://github.com/ModelTC/lightllm, "efficient router"): a request gives its slots back
when it ends, so what a set of requests needs at most is less than the sum of their ends. Ordered by what each
still has to grow, the k-th to stop growing marks a peak: until then the first k have grown by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qrt.engine.schedule.request import Request

Counts = NDArray[np.int64]

# An output is expected to become this long, then a tenth longer than it is (never longer than it may).
EXPECTED_TOKENS = 1024
EXPECTED_GROWTH = 1.1


class Growing:
    """What running requests hold and are expected to take; new ones join them.

    prefill   tokens of all that are to be computed before they grow
    """

    def __init__(self, running: Sequence[Request], *, conservative: bool) -> None:
        """`conservative`: each is expected to grow by as much as it may."""
        self._conservative = conservative
        length, slots = _counts(running, "length"), _counts(running, "seq.length")
        cached = _counts(running, "seq.num_cached")
        left = np.maximum(self._expected(running), slots - length)
        order = np.argsort(left)  # what ends first comes first
        self._held, self._left = (length - cached)[order], left[order]
        self._slots = int((slots - cached).sum())  # more than are held, where some have been given ahead
        self._most = int(self._held.sum() + left.sum())  # if all grew and none ended before the others
        self.prefill = sum(
            [r.prefill_len - r.num_computed for r in running if r.num_computed < r.prefill_len]
        )

    def add(self, request: Request, need: int) -> None:
        """One more request, which is not yet running and has `need` tokens to compute."""
        left = int(self._expected([request])[0])
        index = int(self._left.searchsorted(left))
        self._left = np.concatenate((self._left[:index], (left,), self._left[index:]))
        self._held = np.concatenate((self._held[:index], (need,), self._held[index:]))
        self._slots += need
        self._most += need + left
        self.prefill += need

    def spare(self, slack: int, plenty: int) -> int:
        """Slots beside those they have for all to grow, `slack` as in `peak_slots`; or more than these, but
        no more than `plenty`."""
        if (most := self._most + slack * len(self._left) - self._slots) <= plenty:
            return most
        return _peak(self._held[::-1], self._left[::-1], slack) - self._slots

    def _expected(self, requests: Sequence[Request]) -> Counts:
        """Tokens that each request is still expected to grow by."""
        prompt = _counts(requests, "prompt_len")
        done, most = _counts(requests, "length") - prompt, _counts(requests, "max_len") - prompt
        known = self._conservative or _counts(requests, "params.ignore_eos").astype(bool)
        return np.maximum(expected_output(done, most, conservative=known) - done, 0)


def peak_slots(held: ArrayLike, left: ArrayLike, slack: int = 0) -> int:
    """Most slots that requests hold at once which now hold `held` [n] and grow by `left` [n], a slot each per
    step, and end then. `slack`: steps that each may be late, and slots that it may have ahead, together."""
    held, left = np.asarray(held, np.int64), np.asarray(left, np.int64)
    order = np.argsort(-left, kind="stable")
    return _peak(held[order], left[order], slack)


def _peak(held: Counts, left: Counts, slack: int) -> int:
    """`peak_slots` of requests in the order of what is left, the most first."""
    grown = left + slack  # by each of those before the k-th, when that one ends, or by all it may
    longer = len(left) - left[::-1].searchsorted(grown)  # how many may grow by so much
    total = np.zeros(len(left) + 1, np.int64)
    left.cumsum(out=total[1:])
    return int((held.cumsum() + longer * grown + total[1:] - total[longer]).max(initial=0))


def expected_output(num_output: ArrayLike, most: ArrayLike, *, conservative: ArrayLike) -> Counts:
    """Tokens that the output of each request is taken to have in the end, of at most `most`."""
    longer = np.maximum(EXPECTED_TOKENS, (EXPECTED_GROWTH * np.asarray(num_output)).astype(np.int64))
    return np.where(conservative, most, np.minimum(most, longer))


def _counts(requests: Sequence[Request], name: str) -> Counts:
    """A number of each request, int64 [n]."""
    return np.fromiter(map(attrgetter(name), requests), np.int64, len(requests))
