"""Fillers: threads that fill masks one by one, beside those that are filled at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait

ROW_S = 100e-6  # a mask takes as long, rarely more
MOST_THREADS = 8  # with 12 of 16 cores masks take as long, and the engine's own thread longer


def default_threads() -> int:
    """Return how many threads fill masks on this machine."""
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))


class Fillers:
    """A few threads; they start with the first masks and end with this object."""

    def __init__(self, late_s: float) -> None:
        """Start with no threads; masks that take `late_s` longer than the others are late."""
        self._late_s = late_s
        self._threads = ThreadPoolExecutor(default_threads(), "qrt-masks")

    def start(self, fill: Callable[[], None]) -> Future[None]:
        """Fill a mask in some thread."""
        return self._threads.submit(fill)

    def wait(self, masks: Collection[Future[None]]) -> None:
        """Wait until only late ones are missing: those that are not done a moment from now on."""
        wait(masks, self._late_s + ROW_S * len(masks))
