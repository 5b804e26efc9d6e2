"""Ranks whose memory is all in this process: what the others send is put there by hand."""

import os
import signal
import time
from contextlib import contextmanager

import torch

from ptx import launch
from qrt.kernels.peer_memory import EMPTY, Memory, block_bytes, row_bytes_for


class Ranks:
    """Ranks whose blocks are tensors, `shared` with other processes if asked for."""

    def __init__(self, size, width, device, rows=8, shared=False):
        self.size, self.row_bytes = size, row_bytes_for(width)
        words = block_bytes(size, rows, self.row_bytes) // 4
        blocks = [torch.full((words,), EMPTY, dtype=torch.int32, device=device) for _ in range(size)]
        self.blocks = [block.share_memory_() for block in blocks] if shared else blocks
        launch.reached[:] = self.blocks
        rows_in_all = rows + 1
        self.counts = [block[-rows_in_all:] for block in self.blocks]
        self.places = [block[:-rows_in_all].view(2, size, rows_in_all, -1) for block in self.blocks]
        for counts in self.counts:
            counts.zero_()
        addresses = [block.data_ptr() for block in self.blocks]
        self.memories = [Memory.of(addresses, rank, rows, self.row_bytes, device) for rank in range(size)]

    def arrive(self, rank, data):
        """Put the rows [T, ..] of all ranks but `rank` where that one looks for them next."""
        for source, rows in enumerate(data):
            if source != rank:
                bits = rows.contiguous().view(torch.int32).view(len(rows), -1)
                turn = self.counts[rank][: len(rows)] & 1
                for i, row in enumerate(bits):
                    self.places[rank][int(turn[i]), source, i, : len(row)] = row

    def sent(self, rank, to, like):
        """What `rank` has put into the block of `to` in its last all-reduce."""
        turn = self.counts[rank][: len(like)] - 1 & 1
        found = torch.stack([self.places[to][int(turn[i]), rank, i] for i in range(len(like))])
        return found.view(like.dtype)[:, : like[0].numel()]

    def take_away(self, rank, to):
        """Empty what `rank` has written for `to`, as that one would."""
        self.places[to][:, rank] = EMPTY

    def is_empty(self, rank):
        return all((self.places[rank][:, s] == EMPTY).all() for s in range(self.size) if s != rank)


@contextmanager
def forked(seconds=60):
    """Run the block in two processes, ranks 0 and 1; both must end well within this time."""
    child = os.fork()
    rank = int(child == 0)
    if rank:
        code = 1
        try:
            yield rank
            code = 0
        finally:
            os._exit(code)
    try:
        yield rank
        found, status = 0, 0
        end = time.monotonic() + seconds
        while not found and time.monotonic() < end:
            found, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.02)
        assert found and status == 0, "the other rank failed, or did not end"
        child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
