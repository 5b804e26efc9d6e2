"""PaddedInputs: a plan as tensors of fixed sizes, so that one recorded graph serves many plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qrt.engine.schedule.plan import Plan
from qrt.engine.step.batch import FROM_TABLE, chunks_of, tokens_of
from qrt.engine.step.table import RequestTable
from qrt.kernels.prefill_attention.tiles import FIELDS
from qrt.kernels.step import DecodeMeta, KVPlaces, PrefillMeta, StepMeta
from qrt.kernels.token_inputs import token_inputs
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder

LEAST_CHUNKS = 16  # every padded step has room for this many chunks
TOKENS_PER_CHUNK = 16  # a larger one has room for one chunk per this many tokens


class PaddedInputs:
    """The inputs of padded steps, in one int32 tensor on the device that one copy fills.

    samples   [3, size]   per sample: index of the token it follows, row of the request table, 0 for padding
                          else 1
    _tokens   [3, size]   per token: row, position and id, or FROM_TABLE
    _chunks               ends of `num_chunks` chunks, and the fields of PrefillMeta
    """

    def __init__(
        self,
        rows: int,
        tokens: int,
        model: Decoder,
        kv: KVStorage,
        table: RequestTable,
        *,
        num_cached: int,
        attend_cache: bool,
    ) -> None:
        """Make room for `rows` samples and `tokens`, whose chunks attend `num_cached` in the cache."""
        self._rows, self._kv, self._table, self._queries = rows, kv, table, model.queries
        self._num_cached, self._attend_cache = num_cached, attend_cache
        self._num_heads, self._num_kv_heads = model.arch.num_heads, model.arch.num_kv_heads
        self._windows, self._segments = zip(*model.arch.reaches, strict=True)
        chunks, tiles = self.num_chunks(tokens), self.num_tiles(tokens)
        length = 3 * rows + 3 * tokens + 4 * chunks + 2 + FIELDS * tiles
        self._all = torch.zeros(length, dtype=torch.int32, device=table.device)

    def num_chunks(self, tokens: int) -> int:
        """Return how many chunks a step of `tokens` tokens may have."""
        return min(self._table.pad_row, max(LEAST_CHUNKS, tokens // TOKENS_PER_CHUNK))

    def num_tiles(self, tokens: int) -> int:
        """Return how many tiles these chunks may have; each chunk has at most one partial tile."""
        return tokens * self._queries.group // self._queries.rows + self.num_chunks(tokens)

    def samples(self, size: int) -> Tensor:
        """Return the inputs [3, size] of the samples."""
        return self._all[: 3 * size].view(3, size)

    def _tokens(self, size: int) -> Tensor:
        """Return the inputs [3, size] of the tokens."""
        return self._rest(3 * size).view(3, size)

    def _chunks(self, size: int) -> dict[str, Tensor]:
        """Return the inputs of a step's chunks by name."""
        count, tiles = self.num_chunks(size), self.num_tiles(size)
        lengths = {
            "ends": count, "rows": count, "query_start": count + 1, "cached_start": count + 1,
            "tiles": FIELDS * tiles,
        }  # fmt: skip
        parts = self._rest(3 * size + sum(lengths.values()))[3 * size :].split(list(lengths.values()))
        named = dict(zip(lengths, parts, strict=True))
        return named | {"tiles": named["tiles"].view(tiles, FIELDS)}

    def decodes(self, size: int) -> StepMeta:
        """Return a step of `size` decodes."""
        ids, positions, slots, rope_positions, decode = self._described(size, size)
        own = ids, positions, slots, self._table.slot_table, decode, None, None
        return StepMeta(*own, rope_positions, self._windows_of(size, positions))

    def chunks(self, size: int, decodes: int, attended: Tensor) -> StepMeta:
        """Return a step of `size` tokens: the first `decodes` may decode, the rest belong to chunks.

        Writes the chunks' ends to the request table. `attended` is that of StepMeta.
        """
        chunks = self._chunks(size)
        self._table.length.index_copy_(0, chunks["rows"].long(), chunks.pop("ends"))
        ids, positions, slots, rope_positions, decode = self._described(size, decodes)
        prefill = PrefillMeta(**chunks, num_cached=self._num_cached, attend_cache=self._attend_cache)
        own = ids, positions, slots, self._table.slot_table, decode, prefill, attended
        return StepMeta(*own, rope_positions, self._windows_of(size, positions))

    def _windows_of(self, size: int, positions: Tensor) -> list[KVPlaces]:
        """Return where layers of window groups find K and V of the tokens, which are at `positions`."""
        return self._table.windows(self._tokens(size)[0], positions)

    def _described(
        self, size: int, decodes: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, DecodeMeta | None]:
        """Return what `StepMeta` has of the tokens, and the metadata of the first `decodes`."""
        table, inputs = self._table, self._tokens(size)
        ids, positions, slots, kv_lens, kv_splits = token_inputs(
            inputs,
            table.length,
            table.last_token,
            table.slot_table,
            decodes,
            self._num_kv_heads,
            self._kv.heads_per_sm(decodes, self._num_heads) if decodes else 1,
            self._windows,
            self._segments,
        )
        decode = (
            DecodeMeta(inputs[0, :decodes], kv_lens, kv_splits.unbind(), newest=True) if decodes else None
        )
        return ids, positions, slots, table.rope_positions(inputs[0], positions), decode

    def pad(self, size: int, *, chunks: bool) -> None:
        """Fill the inputs with padding alone."""
        if size <= self._rows:
            self.samples(size).copy_(torch.tensor([[0], [self._table.pad_row], [0]]))
        none: list[NDArray[np.int32]] = [np.full((3, size), FROM_TABLE, np.int32)]
        none[0][0] = self._table.pad_row
        if chunks:
            empty = Plan((), (), (), ())
            none += self._of_chunks(empty, size)
        self._send(none, 3 * self._rows)

    def send(self, plan: Plan, size: int, samples: int) -> None:
        """Send the inputs of a plan, padded to `size` tokens and `samples` samples."""
        self._send([self._of_samples(plan, samples)], 0)
        arrays = [self._of_tokens(plan, size)]
        if plan.chunks:
            arrays += self._of_chunks(plan, size)
        self._send(arrays, 3 * self._rows)

    def _of_chunks(self, plan: Plan, size: int) -> list[NDArray[np.int32]]:
        """Return the values of `_chunks`, in order."""
        count, pad_row = self.num_chunks(size), self._table.pad_row
        ends = np.zeros(count, np.int32)
        ends[: len(plan.chunks)] = [chunk.end for chunk in plan.chunks]
        arrays = chunks_of(plan, self._queries, attend_cache=self._attend_cache).arrays(
            count, self.num_tiles(size), pad_row
        )
        return [ends, *(arrays[name] for name in ("rows", "query_start", "cached_start", "tiles"))]

    def _of_tokens(self, plan: Plan, size: int) -> NDArray[np.int32]:
        inputs, given = np.full((3, size), FROM_TABLE, np.int32), tokens_of(plan)
        inputs[:, : given.shape[1]] = given
        inputs[0, given.shape[1] :] = self._table.pad_row
        return inputs

    def _of_samples(self, plan: Plan, size: int) -> NDArray[np.int32]:
        inputs = np.zeros((3, size), np.int32)
        tokens, rows, counts = inputs
        count = len(plan.sampled)
        tokens[:count], counts[:count] = plan.sampled_at, 1
        rows[:count] = [work.row for work in plan.sampled]
        rows[count:] = self._table.pad_row
        return inputs

    def _rest(self, length: int) -> Tensor:
        return self._all[3 * self._rows : 3 * self._rows + length]

    def _send(self, arrays: Sequence[NDArray[np.int32]], at: int) -> None:
        """Copy arrays, one after the other, to offset `at`, without waiting for the device."""
        length = sum(array.size for array in arrays)
        host = torch.empty(length, dtype=torch.int32, pin_memory=self._all.is_cuda)
        np.concatenate([array.reshape(-1) for array in arrays], out=host.numpy())
        self._all[at : at + length].copy_(host, non_blocking=True)
