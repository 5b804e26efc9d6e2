"""Rows: the free rows of the request table, and whether it is better to wait for more of them."""

from __future__ import annotations

from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.queue import Queue

# One of so many rows may stay empty while requests wait, so that several get rows in one step.
ROWS_PER_ADMISSION = 64
# Plans for which a free row waits for others.
PATIENCE = 16


class Rows:
    """Each running request has one, and needs a token of the step's budget for its decode."""

    def __init__(self, limits: Limits) -> None:
        self._free = list(range(min(limits.max_num_seqs, limits.max_num_batched_tokens)))[::-1]
        self._admitted_at_once = len(self._free) // ROWS_PER_ADMISSION
        self._plans_waited = 0  # for a second row, while one was free

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Return a row that is free, the one given back last."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Note that a request has left its row."""
        self._free.append(row)

    def wait_for_more(self, waiting: Queue) -> bool:
        """Return whether more requests should end before others take their rows; ask once a plan.

        Where more wait than rows are free, the prompts of several in one step take less time than one after
        the other. A free row waits for PATIENCE plans at most, and not at all for a request of higher
        priority than others.
        """
        free = len(self._free)
        waits = free < min(self._admitted_at_once, len(waiting)) and not waiting.has_priorities
        waits = waits and self._plans_waited < PATIENCE
        self._plans_waited = self._plans_waited + 1 if waits and free else 0
        return waits
