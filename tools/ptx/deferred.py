"""What is asked for now and done by the time it is waited for, in groups of each thread."""

from __future__ import annotations

import numpy as np

from ptx.values import Lanes, Work


class Deferred:
    """Work of threads, done as late as they allow."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._asked: list[tuple[Lanes, Work | None]] = []  # None: the end of a group

    def add(self, lanes: Lanes, work: Work) -> None:
        """In the group that is open."""
        self._asked.append((lanes, work))

    def commit(self, lanes: Lanes) -> None:
        """The group of these threads ends."""
        self._asked.append((lanes, None))

    def finish(self, lanes: Lanes, left: int) -> None:
        """Do what these threads asked for but for their last `left` groups."""
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
