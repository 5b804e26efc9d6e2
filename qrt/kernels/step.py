"""The tensors that attention reads: `StepMeta` of one ragged step, `KVLayer` of one layer's cache.

A step holds B requests and T tokens. Requests with one token to compute (decodes) come first and own tokens
[0, num_decodes). The other tokens belong to prefill chunks, packed one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qrt.kernels.prefill_attention.tiles import Queries, plan_tiles


@dataclass(frozen=True)
class DecodeMeta:
    """The decoding requests, one query token each.

    rows       [Bd] int32     each request's row of the slot table
    kv_lens    [Bd] int32     tokens to attend, the new one included (0: a padding row; -1: no decode)
    kv_splits  one [P, 8] int32 for each reach that layers have (`AttentionRule.plan`), from
               `decode_attention.plan`, once a step
    newest     True if each token is its request's newest and its request's only one in the step
    """

    rows: Tensor
    kv_lens: Tensor
    kv_splits: Sequence[Tensor]
    newest: bool = False


@dataclass(frozen=True)
class PrefillMeta:
    """The prefill chunks, packed. Some may be empty.

    rows            [Bp] int32     each request's row of the slot table
    query_start     [Bp+1] int32   where each chunk starts among the step's tokens; decodes come before
    cached_start    [Bp+1] int32   where each chunk's cached tokens start if all are packed; the first is 0
    tiles           [N, 2] int32   the tiles of the chunks, from `prefill_attention.tiles`, once per step
    num_cached      an upper bound of the cached tokens of all chunks, on the host
    attend_cache    read the chunk's own K/V back from the cache instead of attending it raw

    A chunk's cached tokens are those it attends through the cache: its prefix, or with attend_cache its whole
    context.
    """

    rows: Tensor
    query_start: Tensor
    cached_start: Tensor
    tiles: Tensor
    num_cached: int
    attend_cache: bool = False

    @classmethod
    def of(cls, chunks: Chunks, device: torch.device) -> PrefillMeta:
        """Send `chunks` to `device`."""
        sent = {name: torch.from_numpy(array).to(device) for name, array in chunks.arrays().items()}
        return cls(**sent, num_cached=chunks.num_cached, attend_cache=chunks.attend_cache)


@dataclass(frozen=True)
class Chunks:
    """The prefill chunks of a step on the host, [Bp] each.

    rows          each request's row of the slot table
    lengths       tokens of each chunk
    starts        tokens of each chunk's request that come before the chunk
    queries       how the chunks are cut into tiles
    decodes       tokens of the step before the first chunk
    attend_cache  as in PrefillMeta
    """

    rows: Sequence[int]
    lengths: Sequence[int]
    starts: Sequence[int]
    queries: Queries
    decodes: int = 0
    attend_cache: bool = False

    @property
    def cached(self) -> list[int]:
        """Return how many tokens each chunk attends through the cache."""
        if not self.attend_cache:
            return list(self.starts)
        return [start + length for start, length in zip(self.starts, self.lengths, strict=True)]

    @property
    def num_cached(self) -> int:
        """Return how many tokens all chunks together attend through the cache."""
        return sum(self.cached)

    def arrays(
        self, chunks: int | None = None, tiles: int | None = None, row: int = 0
    ) -> dict[str, NDArray[np.int32]]:
        """Return the tensors of PrefillMeta by name, padded to `chunks` chunks and `tiles` tiles.

        Chunks added as padding are empty and name row `row`. None adds no padding.
        """
        more = 0 if chunks is None else chunks - len(self.rows)
        arrays: dict[str, Any] = {
            "rows": [*self.rows, *[row] * more],
            "query_start": np.cumsum([self.decodes, *self.lengths, *[0] * more]),
            "cached_start": np.cumsum([0, *self.cached, *[0] * more]),
            "tiles": plan_tiles(self.lengths, self.starts, self.queries, tiles),
        }
        return {name: np.asarray(array, np.int32) for name, array in arrays.items()}


class KVPlaces(NamedTuple):
    """Where the layers of one group find K and V.

    slots        [T] int32   where each token's K/V is written (padding rows: the pad slot)
    slot_table   [R, Lmax] int32   row r, column p: slot of position p of the request in row r; where no
                 token of the step attends position p, any slot
    """

    slots: Tensor
    slot_table: Tensor


@dataclass(frozen=True)
class StepMeta:
    """The tensors of one step.

    tokens          [T] int64   token ids
    positions       [T] int32   position of each token in its sequence
    slots           slots and slot_table of the first group of layers, as in KVPlaces
    slot_table
    decode          None when no request decodes
    prefill         None when no chunk is prefilled
    attended        [T, Hq, D] or None: where attention writes; it leaves tokens of padding as they are
    rope_positions  [T] int32   each token's row of the RoPE tables, or None: its position
    windows         the other groups of layers
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    slot_table: Tensor
    decode: DecodeMeta | None
    prefill: PrefillMeta | None
    attended: Tensor | None = None
    rope_positions: Tensor | None = None
    windows: Sequence[KVPlaces] = ()

    def places(self, group: int) -> KVPlaces:
        """Return where the layers of `group` find K and V."""
        return self.windows[group - 1] if group else KVPlaces(self.slots, self.slot_table)

    @property
    def num_decodes(self) -> int:
        """Return how many tokens (and requests) decode. They come first."""
        return 0 if self.decode is None else self.decode.rows.shape[0]


@dataclass(frozen=True)
class KVLayer:
    """The cache of one layer.

    format      the format's name in KV_FORMATS
    buffers     the format's tensors, in the order of `KVFormat.buffers`
    smoothing   fp32 [3, Hkv, D] from `qrt.quant.kv.smoothing`, or None to store K as it is
    group       the layers with which it shares slot ids (`StepMeta.places`)
    """

    format: str
    buffers: list[Tensor]
    smoothing: Tensor | None = None
    group: int = 0
