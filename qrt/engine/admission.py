"""Admission: whether the pool has room for one more request, by the peak of what all will hold.

LightLLM's estimate (https://github.com/ModelTC/lightllm, "efficient router"): a request gives its slots back
when it ends, so what a set of requests needs at most is less than the sum of their ends. Ordered by what each
still has to grow, the k-th to stop growing marks a peak: until then the first k have grown by as much.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# An output is expected to become this long, then a tenth longer than it is (never longer than it may).
EXPECTED_TOKENS = 1024
EXPECTED_GROWTH = 1.1


class Growing(NamedTuple):
    """Slots that running requests hold, and that they are still expected to take."""

    held: list[int]
    left: list[int]


def peak_slots(held: ArrayLike, left: ArrayLike) -> int:
    """Most slots that requests hold at once which now hold `held` [n] and grow by `left` [n], a slot each per
    step, and end then."""
    held, left = np.asarray(held, np.int64), np.asarray(left, np.int64)
    order = np.argsort(-left, kind="stable")
    grown = left[order] * np.arange(1, len(order) + 1)
    return int((grown + np.cumsum(held[order])).max(initial=0))


def expected_output(num_output: int, most: int, *, conservative: bool) -> int:
    """Tokens that the output of a request is taken to have in the end, of at most `most`."""
    if conservative:
        return most
    return min(most, max(EXPECTED_TOKENS, int(EXPECTED_GROWTH * num_output)))
