"""Fillers: threads that fill masks, a row each, while the device computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

LATE_S = 200e-6  # rows that take so much longer than the others are late
LATE_SHARE = 8  # one of this many rows may be
MOST_THREADS = 8


def default_threads() -> int:
    """Return how many threads fill masks on this machine."""
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))


class Work:
    """One row's work: a function that runs in some thread.

    done      whether it has run
    error     what it raised
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.done = False
        self.error: Exception | None = None

    def __call__(self) -> None:
        """Run it and keep what it raises."""
        try:
            self._run()
        except Exception as error:
            self.error = error
        self.done = True


class Fillers:
    """A few threads that run Works; they start with the first one and end with the process."""

    def __init__(self, threads: int | None = None) -> None:
        self._count = threads or default_threads()
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[tuple[Work, _Left]] = SimpleQueue()

    def run_most(self, works: Sequence[Work]) -> None:
        """Run all and wait until only late ones are missing; those go on, and are not `done`."""
        few = -(-len(works) // LATE_SHARE) if len(works) > 1 else 0
        left = self._start(works, few)
        left.wait(few)
        if few and not all(work.done for work in works):
            left.wait(0, LATE_S)

    def _start(self, works: Sequence[Work], few: int) -> _Left:
        while len(self._threads) < min(self._count, len(works)):
            thread = threading.Thread(target=self._loop, name="qrt-masks", daemon=True)
            thread.start()
            self._threads.append(thread)
        left = _Left(len(works), few)
        for work in works:
            self._queue.put((work, left))
        return left

    def _loop(self) -> None:
        while True:
            work, left = self._queue.get()
            work()
            left.one_done()


class _Left:
    """Counts works that are not done, and tells the waiting thread of the last `few`."""

    def __init__(self, count: int, few: int) -> None:
        self._count = count
        self._few = few
        self._changed = threading.Condition()

    def one_done(self) -> None:
        with self._changed:
            self._count -= 1
            if self._count <= self._few:
                self._changed.notify_all()

    def wait(self, most: int, timeout: float | None = None) -> None:
        """Wait until at most `most` are not done, or for `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._count <= most, timeout)
