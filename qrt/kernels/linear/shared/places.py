"""Where the tokens of a mixture's experts lie: `Places`, and how a product over them reads and writes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Places(NamedTuple):
    """The assignments t * k + i of T tokens to k experts each, by expert, in blocks of one expert each.

    order         int32 [P]: the assignment of each place, or `assignments` where a block is padded; None
                  where each block has but one place, that of the assignment of the same number
    experts       int32 [blocks]: the expert of each block, -1 beyond the last
    block         places of a block; without `order` the rows that a product computes for its one
    assignments   T * k
    """

    order: Tensor | None
    experts: Tensor
    block: int
    assignments: int

    @property
    def rows(self) -> int:
        """Return how many places there are."""
        return self.assignments if self.order is None else self.order.shape[0]


class Grouped(NamedTuple):
    """How a product over `Places` reads x and writes y.

    places    the blocks; each meets the weight of its expert
    reads     assignments that share a row of x: place p reads row order[p] // reads. 0: row p
    partial_sums  k: assignment a writes row a % k * T + a // k of y [k * T, N]. 0: place p writes row p
    weights   fp32 [T * k]: multiplies what an assignment writes, or None
    """

    places: Places
    reads: int
    partial_sums: int = 0
    weights: Tensor | None = None
