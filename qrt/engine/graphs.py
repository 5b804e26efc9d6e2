"""Graphs: steps of decodes alone, padded to a few sizes and recorded as CUDA graphs.

A recorded step costs the host one small copy and two launches, whatever the model: one graph from last tokens
to hidden states, and one that makes logits, draws and advances the request table. Rows that ask for more than
greedy, temperature and seed are drawn outside, from the hidden states. Padding rows are the table's last row:
they attend nothing and write the pad slot. Where nothing is recorded (`--enforce-eager`, a CPU) the same
padded steps run kernel by kernel, so that the tokens do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from qrt.engine.plan import Plan
from qrt.engine.table import RequestTable
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
        # of a step of n decodes: n rows, then n slots
        self._inputs = torch.empty(2 * self._sizes[-1], dtype=torch.int32, device=table.device)
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
            self._send([], size)
            self._draw(size, self._forward(size))  # compiles the kernels
            torch.cuda.synchronize(self._table.device)
            forward, drawing = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(forward, pool=pool):
                hidden = self._forward(size)
            with torch.cuda.graph(drawing, pool=pool):
                tokens = self._draw(size, hidden)
            self._recorded[size] = _Recorded(forward, hidden, drawing, tokens)

    def forward(self, plan: Plan) -> Tensor:
        """Hidden states [n, H] of the n decodes, good until the next call."""
        size = self._size(plan)
        self._send([(decode.row, decode.slot) for decode in plan.decodes], size)
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

    def _send(self, places: Sequence[tuple[int, int]], size: int) -> None:
        """Rows and slots of a step, padded, to the device."""
        padded = [*places, *[(self._table.pad_row, self._kv.pad_slot)] * (size - len(places))]
        pinned = self._inputs.device.type == "cuda"
        host = torch.tensor(padded, dtype=torch.int32).T.contiguous()
        self._inputs[: 2 * size].copy_((host.pin_memory() if pinned else host).view(-1), non_blocking=True)

    def _forward(self, size: int) -> Tensor:
        table, (rows, slots) = self._table, self._inputs[: 2 * size].view(2, size)
        row = rows.long()
        kv_lens = table.length[row]
        positions = (kv_lens - 1).clamp(min=0)  # of padding rows 0
        table.slot_table.view(-1).index_copy_(0, row * table.slot_table.shape[1] + positions, slots)
        heads = self._model.config.num_kv_heads
        splits = plan_splits(kv_lens, heads, self._kv.programs_per_sm)
        step = StepMeta(
            table.last_token[row],
            positions,
            slots,
            table.slot_table,
            self._every[:size],
            DecodeMeta(rows, kv_lens, splits),
            None,
        )
        return self._model.hidden(step, self._kv)

    def _draw(self, size: int, hidden: Tensor) -> Tensor:
        table, rows = self._table, self._inputs[:size].long()
        logits = self._model.logits(hidden)
        tokens = draw(logits, rows, table.temperature, table.seed, table.length, None)
        table.advance(rows, tokens)
        table.length[table.pad_row :].zero_()
        return tokens
