"""Garbage: Python's full collections, kept short while an engine runs in the process of its user."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Freezer:
    """Keeps the objects that there are out of collections as long as somebody wants it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holders = 0
        self._frozen = False

    def hold(self) -> None:
        """One more wants it; nothing happens where the user of the process keeps some out already."""
        with self._lock:
            if self._holders == 0 and gc.get_freeze_count() == 0:
                gc.freeze()
                self._frozen = True
            self._holders += 1

    def release(self) -> None:
        """One less."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._frozen:
                gc.unfreeze()
                self._frozen = False


_freezer = _Freezer()


@contextmanager
def short_collections() -> Iterator[None]:
    """Leave all objects that there are out of garbage collections meanwhile.

    A full collection of a process with torch and transformers takes 0.1 s, in which no step is launched.
    """
    _freezer.hold()
    try:
        yield
    finally:
        _freezer.release()
