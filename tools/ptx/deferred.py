"""Keep work that threads ask for now, and that is done when they wait for it, in groups per thread."""

from __future__ import annotations

import numpy as np

from ptx.values import Lanes, Work


class Deferred:
    """Do the work of threads as late as they allow."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._asked: list[tuple[Lanes, Work | None]] = []  # None marks the end of a group

    def add(self, lanes: Lanes, work: Work) -> None:
        """Add work to the open group of these threads."""
        self._asked.append((lanes, work))

    def commit(self, lanes: Lanes) -> None:
        """End the open group of these threads."""
        self._asked.append((lanes, None))

    def finish(self, lanes: Lanes, left: int) -> None:
        """Do all the work of these threads, except for their last `left` groups."""
        mine, ended = np.zeros(self._lanes, bool), np.zeros(self._lanes, np.int32)
        mine[lanes] = True
        parts = []
        for asked, work in reversed(self._asked):
            if work is None:
                ended[asked] += 1
            due = mine[asked] & (ended[asked] > left)
            parts.append((asked[due], asked[~due], work))
        self._asked = []
        for now, later, work in reversed(parts):
            if len(now) and work is not None:
                work(now)
            if len(later):
                self._asked.append((later, work))
