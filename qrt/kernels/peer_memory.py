"""The memory that the ranks of one host write to: how it is laid out, and what kernels are told of it.

Each rank has one block, which all ranks may write: places uint8 [2, R, rows, row_bytes], where copy, source
rank and row find each other, and behind them int32 [rows], how often each row has been all-reduced. Only the
block's rank reads it, and counts. all_reduce/device.py says how. The last row is that of `chain` for one
token.

A kernel gets `words`, int64 [BLOCKS + R]: how long to wait in ns, this rank, rows, row_bytes, and where the
blocks are: its own, then those of the ranks behind it, then of those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PATIENCE, RANK, ROWS, ROW_BYTES, BLOCKS = range(5)  # what is where in the words
EMPTY = -0x7FFF8000  # int32: what a place holds until something arrives, 0x8000 twice
MOST_BYTES = {2: 4 << 20, 3: 2 << 20, 4: 1 << 20}  # of rows in 16 bits, by ranks: NCCL takes more
LEAST_BYTES = 256 << 10  # the same for more ranks
ALIGNMENT = 16
NS = 1_000_000_000
START_SECONDS, SECONDS = 600, 30  # how long a rank waits for another: at the start, where kernels compile


@dataclass(frozen=True)
class Memory:
    """The memory of one rank and its peers, as the operators of `qrt.kernels` take it.

    words        int64 [BLOCKS + R], on the rank's device
    rows         most rows of one all-reduce, one less than there are
    row_bytes    most bytes of a row
    """

    words: Tensor
    rows: int
    row_bytes: int

    @classmethod
    def of(cls, blocks: Sequence[int], rank: int, rows: int, row_bytes: int, device: torch.device) -> Memory:
        """Return what rank `rank` of the blocks at these addresses sees; it has START_SECONDS of patience."""
        words = [START_SECONDS * NS, rank, rows + 1, row_bytes, *blocks[rank:], *blocks[:rank]]
        return cls(torch.tensor(words, dtype=torch.int64, device=device), rows, row_bytes)

    def takes(self, x: Tensor) -> bool:
        """Return whether x [T, K] or [S, T, K] fits it: not too many rows or columns."""
        return x.shape[-2] <= self.rows and 4 * x.shape[-1] <= self.row_bytes

    def wait(self, seconds: float) -> None:
        """Let kernels wait so long for another rank, from the next one on; then they end the process."""
        self.words[PATIENCE].fill_(int(seconds * NS))


def ranks_of(words: Tensor | None) -> int:
    """Return the number of ranks, 0 without words."""
    return 0 if words is None else len(words) - BLOCKS


def rows_for(ranks: int, width: int, multiprocessors: int) -> int:
    """Return the most rows of `width` columns that are all-reduced through memory.

    A program has a row or more, and waits for the others' programs of that row. A GPU runs two a
    multiprocessor, so all run at once.
    """
    return max(1, min(MOST_BYTES.get(ranks, LEAST_BYTES) // (2 * width), 2 * multiprocessors))


def row_bytes_for(width: int) -> int:
    """Return the bytes of a row of `width` columns in fp32, aligned."""
    return -(-4 * width // ALIGNMENT) * ALIGNMENT


def places_bytes(ranks: int, rows: int, row_bytes: int) -> int:
    """Return the bytes of a block's places, for all-reduces of `rows`."""
    return 2 * ranks * (rows + 1) * row_bytes


def block_bytes(ranks: int, rows: int, row_bytes: int) -> int:
    """Return the bytes of a whole block."""
    return places_bytes(ranks, rows, row_bytes) + 4 * (rows + 1)
