"""What must not happen while garbage is collected: to record a CUDA graph, and to parse in threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
