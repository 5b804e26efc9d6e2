"""Ranks whose memory is all in this process: what the others send is put there by hand."""

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
        self.counts = [block[-rows:] for block in self.blocks]
        self.places = [block[:-rows].view(2, size, rows, -1) for block in self.blocks]
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
        """What `rank` has put into the block of `to` in its last exchange."""
        turn = self.counts[rank][: len(like)] - 1 & 1
        found = torch.stack([self.places[to][int(turn[i]), rank, i] for i in range(len(like))])
        return found.view(like.dtype)[:, : like[0].numel()]

    def take_away(self, rank, to):
        """Empty what `rank` has written for `to`, as that one would."""
        self.places[to][:, rank] = EMPTY

    def is_empty(self, rank):
        return all((self.places[rank][:, s] == EMPTY).all() for s in range(self.size) if s != rank)
