"""StepInputs: what a padded step is made of, in one tensor on the device, sent there in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qrt.engine.schedule.plan import Plan
from qrt.engine.step.batch import chunks_of
from qrt.engine.step.table import RequestTable
from qrt.kernels.prefill_attention.tiles import FIELDS
from qrt.model.decoder import Decoder

LEAST_CHUNKS = 16  # of a step, and
TOKENS_PER_CHUNK = 16  # one more for so many tokens
TABLE = -1  # of an input: what the request table says


class StepInputs:
    """The inputs of padded steps in one int32 tensor: what is drawn first, then the rest.

    Of what is drawn (`draws`): the token behind which, its row, and 1, or 0 of padding; [3, size]. Of each
    token (`tokens`): its row, its position and itself (TABLE: what the table says); [3, size]. Of chunks
    (`chunks`): their ends, and what PrefillMeta has, for `num_chunks` of them.
    """

    def __init__(self, rows: int, tokens: int, table: RequestTable, model: Decoder) -> None:
        self._rows, self._table, self._queries = rows, table, model.queries
        chunks, tiles = self.num_chunks(tokens), self.num_tiles(tokens)
        length = 3 * rows + 3 * tokens + 4 * chunks + 2 + FIELDS * tiles
        self._all = torch.zeros(length, dtype=torch.int32, device=table.device)

    def num_chunks(self, tokens: int) -> int:
        """Return how many chunks a step of so many tokens may have."""
        return min(self._table.pad_row, max(LEAST_CHUNKS, tokens // TOKENS_PER_CHUNK))

    def num_tiles(self, tokens: int) -> int:
        """Return how many tiles these may have: a chunk has at most one that is not whole."""
        return tokens * self._queries.group // self._queries.rows + self.num_chunks(tokens)

    def draws(self, size: int) -> Tensor:
        """Return the inputs [3, size] of what is drawn."""
        return self._all[: 3 * size].view(3, size)

    def tokens(self, size: int) -> Tensor:
        """Return the inputs [3, size] of tokens."""
        return self._rest(3 * size).view(3, size)

    def chunks(self, size: int) -> dict[str, Tensor]:
        """Return the inputs of a step's chunks by name."""
        count, tiles = self.num_chunks(size), self.num_tiles(size)
        lengths = {
            "ends": count, "rows": count, "query_start": count + 1, "cached_start": count + 1,
            "tiles": FIELDS * tiles,
        }  # fmt: skip
        parts = self._rest(3 * size + sum(lengths.values()))[3 * size :].split(list(lengths.values()))
        named = dict(zip(lengths, parts, strict=True))
        return named | {"tiles": named["tiles"].view(tiles, FIELDS)}

    def pad(self, size: int, *, chunks: bool) -> None:
        """Make them those of padding alone."""
        if size <= self._rows:
            self.draws(size).copy_(torch.tensor([[0], [self._table.pad_row], [0]]))
        none: list[NDArray[np.int32]] = [np.full((3, size), TABLE, np.int32)]
        none[0][0] = self._table.pad_row
        if chunks:
            empty = Plan((), (), (), ())
            none += self.of_chunks(empty, size, attend_cache=False)
        self._send(none, 3 * self._rows)

    def send(self, plan: Plan, size: int, draws: int, *, attend_cache: bool) -> None:
        """Send those of a plan, which is padded to `size` tokens and `draws` rows drawn."""
        self._send([self._of_draws(plan, draws)], 0)
        arrays = [self._of_tokens(plan, size)]
        if plan.chunks:
            arrays += self.of_chunks(plan, size, attend_cache=attend_cache)
        self._send(arrays, 3 * self._rows)

    def of_chunks(self, plan: Plan, size: int, *, attend_cache: bool) -> list[NDArray[np.int32]]:
        """Return the values of `chunks`, in its order."""
        count, pad_row = self.num_chunks(size), self._table.pad_row
        ends = np.zeros(count, np.int32)
        ends[: len(plan.chunks)] = [chunk.end for chunk in plan.chunks]
        arrays = chunks_of(plan, self._queries, attend_cache=attend_cache).arrays(
            count, self.num_tiles(size), pad_row
        )
        return [ends, *(arrays[name] for name in ("rows", "query_start", "cached_start", "tiles"))]

    def _of_tokens(self, plan: Plan, size: int) -> NDArray[np.int32]:
        inputs = np.full((3, size), TABLE, np.int32)
        rows, positions, tokens = inputs
        at = len(plan.decodes)
        rows[:at] = [decode.row for decode in plan.decodes]
        for chunk in plan.chunks:
            own = slice(at, at := at + len(chunk.tokens))
            rows[own], positions[own], tokens[own] = (
                chunk.row,
                np.arange(chunk.start, chunk.end),
                chunk.tokens,
            )
        rows[at:] = self._table.pad_row
        return inputs

    def _of_draws(self, plan: Plan, size: int) -> NDArray[np.int32]:
        inputs = np.zeros((3, size), np.int32)
        tokens, rows, drawn = inputs
        count = len(plan.sampled)
        tokens[:count], drawn[:count] = plan.sampled_at, 1
        rows[:count] = [work.row for work in plan.sampled]
        rows[count:] = self._table.pad_row
        return inputs

    def _rest(self, length: int) -> Tensor:
        return self._all[3 * self._rows : 3 * self._rows + length]

    def _send(self, arrays: Sequence[NDArray[np.int32]], at: int) -> None:
        """Copy arrays, one after the other, to place `at`, without waiting for the device."""
        length = sum(array.size for array in arrays)
        host = torch.empty(length, dtype=torch.int32, pin_memory=self._all.is_cuda)
        np.concatenate([array.reshape(-1) for array in arrays], out=host.numpy())
        self._all[at : at + length].copy_(host, non_blocking=True)
