"""Who may use the GPU when: tests of several processes side by side, those marked `alone` one at a time.

A reader/writer lock of two files, for all test processes of a user on this machine: it is given up with the
process that holds it, however that ends.
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
MOST = 4 * GIB  # that a test beside others may take: fourteen of them and their contexts fit into 80 GB


@contextmanager
def turn(alone: bool, folder: Path = FOLDER) -> Iterator[None]:
    """Wait until nobody is on the GPU, or nobody `alone`, and keep it so within the block.

    Whoever waits holds the queue, through which everybody comes: those who wait to be alone are not
    overtaken for ever by others who are not.
    """
    folder.mkdir(exist_ok=True)
    with open(folder / "room", "w") as room:
        with open(folder / "queue", "w") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def give_back() -> None:
    """Free what torch keeps of the GPU's memory for this process's later tests: others may want it."""
    import torch

    if torch.cuda.is_initialized():
        if torch.cuda.memory_allocated():
            gc.collect()
        torch.cuda.empty_cache()


def is_too_large() -> str | None:
    """What is wrong with a test that others were beside, since the peak was reset; None if nothing is."""
    import torch  # here, because processes that test the lock would wait seconds for it

    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    if peak <= MOST:
        return None
    return f"took {peak / GIB:.1f} GiB of the GPU, at most {MOST / GIB:.0f} beside others: mark it `alone`"
