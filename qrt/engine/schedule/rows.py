"""Rows: the free rows of the request table, and whether it is better to wait for more of them."""

from __future__ import annotations

from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.queue import Queue

# One of this many rows may stay empty while requests wait, so that several get rows in one step.
ROWS_PER_ADMISSION = 64
# Plans for which a free row waits for others.
PATIENCE = 16


class Rows:
    """Free rows; each running request has one, and needs one token of the step's budget to decode."""

    def __init__(self, limits: Limits) -> None:
        self._free = list(range(min(limits.max_num_seqs, limits.max_num_batched_tokens)))[::-1]
        self._admitted_at_once = len(self._free) // ROWS_PER_ADMISSION
        self._plans_waited = 0  # for a second row, while one was free

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take the free row that was given back last."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Give back the row of a request."""
        self._free.append(row)

    def wait_for_more(self, waiting: Queue) -> bool:
        """Return whether to wait until more rows are free before requests take them; call once per plan.

        When many requests wait, the prompts of several take less time in one step than one after the other.
        A free row waits for at most PATIENCE plans, and never while requests of different priorities wait.
        """
        free = len(self._free)
        waits = free < min(self._admitted_at_once, len(waiting)) and not waiting.has_priorities
        waits = waits and self._plans_waited < PATIENCE
        self._plans_waited = self._plans_waited + 1 if waits and free else 0
        return waits
