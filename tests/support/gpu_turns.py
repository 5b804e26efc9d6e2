"""Let tests take turns on the GPU: several side by side, or one marked `alone`.

The turns are a reader/writer lock on two files, for all test processes of a user on this machine. The system
releases it when the process that holds it ends.
"""

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / f"qrt-gpu-tests-{os.getuid()}"
GIB = 1 << 30
MOST = 4 * GIB  # most memory of a test that is not alone: fourteen and their contexts fit into 80 GB


@contextmanager
def turn(alone: bool, folder: Path = FOLDER) -> Iterator[None]:
    """Use the GPU in the block: without any other test if `alone`, else without one that is alone.

    A test that waits holds the queue, and every test passes through the queue. So other tests cannot overtake
    one that waits to be alone.
    """
    folder.mkdir(exist_ok=True)
    with open(folder / "room", "w") as room:
        with open(folder / "queue", "w") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def give_back() -> None:
    """Free the GPU memory that torch keeps for later tests of this process, so that others can use it."""
    import torch

    if torch.cuda.is_initialized():
        if torch.cuda.memory_allocated():
            gc.collect()
        torch.cuda.empty_cache()


def is_too_large() -> str | None:
    """Return a complaint if a test that is not alone took too much memory since the peak was reset."""
    import torch  # here, because it takes seconds, and processes that test the lock do not need it

    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    if peak <= MOST:
        return None
    return f"took {peak / GIB:.1f} GiB of the GPU, at most {MOST / GIB:.0f} beside others: mark it `alone`"
