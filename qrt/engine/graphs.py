"""Graphs: steps of decodes alone, padded to a few sizes and recorded as CUDA graphs.

A recorded step costs the host two launches, whatever the model: one graph from last tokens to hidden states,
and one that makes logits, draws and advances the request table. Everything else is in the table already; the
rows travel when they are others than in the step before. Rows that ask for more than greedy, temperature and
seed are drawn outside, from the hidden states. Padding rows are the table's last row: they attend nothing and
write the pad slot. Where nothing is recorded (`--enforce-eager`, a CPU) the same padded steps run kernel by
kernel, so that the tokens do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from qrt.engine.plan import Plan
from qrt.engine.table import RequestTable
from qrt.engine.transfer import to_device
from qrt.kernels.decode_attention import plan_splits
from qrt.kernels.sample import sample as draw
from qrt.kernels.step import DecodeMeta, StepMeta
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder

LARGEST = 256  # by default; more decode kernel by kernel


class _Recorded(NamedTuple):
    forward: torch.cuda.CUDAGraph
    hidden: Tensor
    draw: torch.cuda.CUDAGraph
    tokens: Tensor


def default_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256 or the first that holds `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, LARGEST + 1, 8)]
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < max_num_seqs]


class DecodeSteps:
    """Steps of at most `sizes[-1]` decodes over one model, K/V storage and request table."""

    def __init__(self, model: Decoder, kv: KVStorage, table: RequestTable, sizes: Sequence[int]) -> None:
        self._model = model
        self._kv = kv
        self._table = table
        self._sizes = sorted(set(sizes))
        self._rows = torch.empty(self._sizes[-1], dtype=torch.int32, device=table.device)
        self._sent: list[int] = []  # what `_rows` holds
        self._every = torch.arange(self._sizes[-1], device=table.device)
        self._recorded: dict[int, _Recorded] = {}

    def take(self, plan: Plan) -> bool:
        """Whether the plan is such a step."""
        return bool(plan.decodes) and not plan.chunks and len(plan.decodes) <= self._sizes[-1]

    @torch.inference_mode()
    def record(self) -> None:
        """Record every size, the largest first: the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in tqdm(self._sizes[::-1], desc="Recording CUDA graphs", unit="size"):
            self._send([self._table.pad_row] * size)
            self._draw(size, self._forward(size))  # compiles the kernels
            torch.cuda.synchronize(self._table.device)
            forward, drawing = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(forward, pool=pool):
                hidden = self._forward(size)
            with torch.cuda.graph(drawing, pool=pool):
                tokens = self._draw(size, hidden)
            self._recorded[size] = _Recorded(forward, hidden, drawing, tokens)

    def send(self, plan: Plan) -> None:
        """Tell the device which rows the plan's decodes are of, if it does not know."""
        rows = [decode.row for decode in plan.decodes]
        rows += [self._table.pad_row] * (self._size(plan) - len(rows))
        if rows != self._sent[: len(rows)]:
            self._send(rows)

    def forward(self, plan: Plan) -> Tensor:
        """Hidden states [n, H] of the n decodes that were sent, good until the next call."""
        size = self._size(plan)
        if recorded := self._recorded.get(size):
            recorded.forward.replay()
            return recorded.hidden[: len(plan.decodes)]
        self._hidden = self._forward(size)
        return self._hidden[: len(plan.decodes)]

    def draw(self, plan: Plan) -> Tensor:
        """Tokens int64 [n] of the step whose `forward` was the last: greedy, or by temperature and seed. The
        request table is advanced."""
        size = self._size(plan)
        if recorded := self._recorded.get(size):
            recorded.draw.replay()
            return recorded.tokens[: len(plan.decodes)]
        return self._draw(size, self._hidden)[: len(plan.decodes)]

    def _size(self, plan: Plan) -> int:
        return next(size for size in self._sizes if size >= len(plan.decodes))

    def _send(self, rows: list[int]) -> None:
        sent = to_device({"rows": np.array(rows, np.int32)}, self._rows.device)["rows"]
        self._rows[: len(rows)].copy_(sent)
        self._sent = rows

    def _forward(self, size: int) -> Tensor:
        table, rows = self._table, self._rows[:size]
        kv_lens = table.length[rows]
        positions = (kv_lens - 1).clamp(min=0)  # of padding rows 0, whose slot is the pad slot
        slots = table.slots(rows, positions)
        heads = self._model.config.num_kv_heads
        splits = plan_splits(kv_lens, heads, self._kv.programs_per_sm)
        step = StepMeta(
            table.last_token[rows],
            positions,
            slots,
            table.slot_table,
            self._every[:size],
            DecodeMeta(rows, kv_lens, splits),
            None,
        )
        return self._model.hidden(step, self._kv)

    def _draw(self, size: int, hidden: Tensor) -> Tensor:
        table, rows = self._table, self._rows[:size].long()
        logits = self._model.logits(hidden)
        tokens = draw(logits, rows, table.temperature, table.seed, table.length, None)
        table.advance(rows, tokens)
        table.length[table.pad_row :].zero_()
        return tokens
