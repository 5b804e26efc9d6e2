"""Fillers: threads that fill masks one by one, beside those that are filled at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

ROW_S = 100e-6  # a mask takes as long, rarely more
MOST_THREADS = 8  # with 12 of 16 cores masks take as long, and the engine's own thread longer


def default_threads() -> int:
    """Return how many threads fill masks on this machine."""
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))


class Work:
    """A function that runs in some thread.

    done      whether it has run
    error     what it raised
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._done = threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> None:
        """Run it and keep what it raises."""
        try:
            self._run()
        except Exception as error:
            self.error = error
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether it has run."""
        return self._done.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until it has run, at most for so long."""
        self._done.wait(max(0.0, seconds))


class Fillers:
    """A few threads that run Works; they start with the first ones and end with the process."""

    def __init__(self, late_s: float) -> None:
        """Start with no threads; masks that take `late_s` longer than the others are late."""
        self._late_s = late_s
        self._most = default_threads()
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[Work] = SimpleQueue()

    def start(self, work: Work) -> None:
        """Run a work in some thread."""
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._loop, name="qrt-masks", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._queue.put(work)

    def wait(self, works: Sequence[Work]) -> None:
        """Wait until only late ones are missing: those that are not done a moment from now on."""
        ends = time.perf_counter() + self._late_s + ROW_S * len(works)
        for work in works:
            if not work.done:
                work.wait(ends - time.perf_counter())

    def _loop(self) -> None:
        while True:
            self._queue.get()()
