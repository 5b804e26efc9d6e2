"""How the queries of chunks are cut into tiles: on the host with numpy, once per step for all layers.

A kernel's grid is fixed when a CUDA graph is recorded, but the chunks are not. So the tiles are a list on the
device, and each program reads from its entry what to attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROWS = {(2, True): 128, (2, False): 64, (4, True): 32, (4, False): 32}  # by itemsize and whether D <= 128
FIELDS = 2  # int32 per tile: its chunk, and its first row in the chunk
NONE = -1  # the chunk of an entry without a tile


def tile_rows(itemsize: int, head_dim: int) -> int:
    """Return the rows of a tile. A row is a token and a query head; all heads of a tile share a KV head."""
    return ROWS[itemsize, head_dim <= 128]


class Queries(NamedTuple):
    """The sizes of a model that decide how its queries are cut.

    group   query heads per KV head
    rows    rows of a tile
    """

    group: int
    rows: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> Queries:
        """Return the sizes for queries of `itemsize` bytes a value."""
        return cls(num_heads // num_kv_heads, tile_rows(itemsize, head_dim))

    def tiles(self, lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tiles each of the chunks of `lengths` [B] tokens has."""
        return -(-np.asarray(lengths, np.int64) * self.group // self.rows)


def plan_tiles(
    lengths: Sequence[int], cached: Sequence[int], queries: Queries, room: int | None = None
) -> NDArray[np.int32]:
    """Return the tiles of chunks of `lengths` [B] tokens after `cached` [B] others: int32 [N, FIELDS].

    Tiles that attend most come first, so that the last programs to start are short. The list is padded to
    length `room`, if given, with entries of chunk NONE. Raises ValueError if `room` does not hold all tiles.
    """
    own, behind, counts = np.asarray(lengths), np.asarray(cached), queries.tiles(lengths)
    total = int(counts.sum())
    if room is not None and total > room:
        raise ValueError(f"room: expected at least {total}, the tiles of these chunks; got {room}")
    chunk = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(total) - np.repeat(counts.cumsum() - counts, counts)) * queries.rows
    seen = behind[chunk] + np.minimum((first + queries.rows - 1) // queries.group + 1, own[chunk])
    order = np.argsort(-seen, kind="stable")
    tiles = np.full((total if room is None else room, FIELDS), NONE, np.int32)
    tiles[:total, 0], tiles[:total, 1] = chunk[order], first[order]
    return tiles
