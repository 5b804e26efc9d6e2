"""Admission: whether the pool has room for one more request, by the peak of what all will hold.

LightLLM's estimate (https://github.com/ModelTC/lightllm, "efficient router"): a request gives its slots back
when it ends, so what a set of requests needs at most is less than the sum of their ends. Ordered by what each
still has to grow, the k-th to stop growing marks a peak: until then the first k have grown by as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

# An output is expected to become this long, then a tenth longer than it is (never longer than it may).
EXPECTED_TOKENS = 1024
EXPECTED_GROWTH = 1.1


@dataclass
class Growing:
    """What running requests hold and are expected to take.

    held     tokens of each, whose slots it gives back when it ends
    left     tokens that each still grows by
    slots    of all of them now: more than the tokens, where some have been given ahead
    prefill  tokens of all that are to be computed before they grow
    """

    held: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    slots: int = 0
    prefill: int = 0

    def add(self, held: int, left: int, slots: int, prefill: int) -> None:
        """One more request."""
        self.held.append(held)
        self.left.append(left)
        self.slots += slots
        self.prefill += prefill

    def spare(self, slack: int) -> int:
        """Slots beside those they have for all to grow, `slack` as in `peak_slots`."""
        return peak_slots(self.held, self.left, slack) - self.slots


def peak_slots(held: ArrayLike, left: ArrayLike, slack: int = 0) -> int:
    """Most slots that requests hold at once which now hold `held` [n] and grow by `left` [n], a slot each per
    step, and end then. `slack`: steps that each may be late, and slots that it may have ahead, together."""
    held, left = np.asarray(held, np.int64), np.asarray(left, np.int64)
    order = np.argsort(-left, kind="stable")
    left = left[order]
    grown = left + slack  # by each of those before the k-th, when that one ends, or by all it may
    longer = np.searchsorted(-left, -grown, side="right")  # how many may grow by so much
    total = np.concatenate([[0], np.cumsum(left)])
    return int((np.cumsum(held[order]) + longer * grown + total[1:] - total[longer]).max(initial=0))


def expected_output(num_output: int, most: int, *, conservative: bool) -> int:
    """Tokens that the output of a request is taken to have in the end, of at most `most`."""
    if conservative:
        return most
    return min(most, max(EXPECTED_TOKENS, int(EXPECTED_GROWTH * num_output)))
