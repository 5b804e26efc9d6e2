"""Keep garbage collections out of the way: none while a graph is recorded, short ones beside an engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Freezer:
    """Keeps existing objects out of garbage collections while at least one holder asks for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holders = 0
        self._frozen = False

    def hold(self) -> None:
        """Add a holder; freeze, unless the user of the process has frozen objects already."""
        with self._lock:
            if self._holders == 0 and gc.get_freeze_count() == 0:
                gc.freeze()
                self._frozen = True
            self._holders += 1

    def release(self) -> None:
        """Remove a holder; unfreeze after the last one."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._frozen:
                gc.unfreeze()
                self._frozen = False


_freezer = _Freezer()


@contextmanager
def short_collections() -> Iterator[None]:
    """Keep all existing objects out of garbage collections inside the block.

    A full collection in a process with torch and transformers takes 0.1 s, during which no step is launched.
    """
    _freezer.hold()
    try:
        yield
    finally:
        _freezer.release()


@contextmanager
def garbage_left() -> Iterator[None]:
    """Collect no garbage inside the block.

    CUDA cannot destroy an old graph while it records another. Before Python 3.11.8, threads that parse while
    one of them collects fail (github.com/python/cpython/issues/106905).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
