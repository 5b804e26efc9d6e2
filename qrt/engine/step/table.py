"""RequestTable: the running requests on the device, one row each.

Last tokens, lengths and sampling parameters are already there when a step of decodes follows another. Only
new slot numbers have to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.plan import Admission, Placement
from qrt.engine.step.transfer import to_device
from qrt.kernels.step import KVPlaces
from qrt.kernels.token_inputs import advance

ROW_MULTIPLE = 64  # rows of the slot table start at multiples of 256 bytes, for wide loads in Triton


class RequestTable:
    """R = max_num_seqs + 1 rows; the last one is for padding and always points to the pad slot.

    last_token    [R] int64   token sampled last; its K/V are not yet written
    length        [R] int32   number of known tokens, so the position of the next one
    temperature   [R] fp32    0: greedy
    top_k         [R] int64   0: off
    top_p         [R] fp32
    seed          [R] int64
    min_p         [R] fp32    0: off
    slot_tables   [N, R, Lmax] int32   slot of each position in each group of layers; stale beyond a request's
                  length, and before its window
    slot_table    [R, Lmax] int32   that of the first group
    rope_offset   [R] int32   row of the RoPE tables for its position 0; None: 0 for all
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        pad_slots: int | Sequence[int],
        device: torch.device,
        *,
        long_rope_switch: int = 0,
    ) -> None:
        """Make an empty table; `pad_slots` are those of each group of layers, a number if there is one."""
        rows = max_num_seqs + 1
        width = -(-max_model_len // ROW_MULTIPLE) * ROW_MULTIPLE
        self.device = device
        self.pad_row = max_num_seqs
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.length = torch.zeros(rows, dtype=torch.int32, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rope_offset = torch.zeros_like(self.length) if long_rope_switch else None
        pads = [pad_slots] if isinstance(pad_slots, int) else pad_slots
        self.slot_tables = torch.empty(len(pads), rows, width, dtype=torch.int32, device=device)
        for table, pad in zip(self.slot_tables, pads, strict=True):
            table.fill_(pad)
        self.slot_table = self.slot_tables[0]

    @classmethod
    def of(cls, limits: Limits, pad_slots: Sequence[int], device: torch.device) -> RequestTable:
        """Make the empty table of an engine with these limits."""
        sizes = limits.max_num_seqs, limits.max_model_len
        return cls(*sizes, pad_slots, device, long_rope_switch=limits.long_rope_switch)

    def admit(self, admitted: Sequence[Admission]) -> None:
        """Write the sampling parameters of requests that have just got a row, and how they turn."""
        sampling = [new.sampling for new in admitted]
        columns: dict[str, NDArray[Any]] = {
            "seed": np.array([s.seed for s in sampling], np.int64),
            "top_k": np.array([s.top_k for s in sampling], np.int64),
            "temperature": np.array([s.temperature for s in sampling], np.float32),
            "top_p": np.array([s.top_p for s in sampling], np.float32),
            "min_p": np.array([s.min_p for s in sampling], np.float32),
        }
        if self.rope_offset is not None:
            columns["rope_offset"] = np.array([new.rope_offset for new in admitted], np.int32)
        rows = np.array([new.row for new in admitted], np.int64)
        sent = to_device({"rows": rows, **columns}, self.device)
        for name in columns:
            getattr(self, name).index_copy_(0, sent["rows"], sent[name])

    def write_slots(self, placed: Sequence[Placement]) -> None:
        """Write new slots of requests."""
        _, rows, width = self.slot_tables.shape
        indices = [
            np.arange(new.start, new.start + len(new.slots)) + (new.group * rows + new.row) * width
            for new in placed
        ]
        slots = np.concatenate([new.slots for new in placed])
        sent = to_device({"indices": np.concatenate(indices), "slots": slots}, self.device)
        self.slot_tables.view(-1).index_copy_(0, sent["indices"], sent["slots"])

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the slots int32 [n] of `positions` [n] in `rows` [n] in the first group of layers."""
        return self.slot_table.view(-1)[rows.long() * self.slot_table.shape[1] + positions]

    def rope_positions(self, rows: Tensor, positions: Tensor) -> Tensor | None:
        """Return `StepMeta.rope_positions` of tokens at `positions` [T] in `rows` [T]."""
        return None if self.rope_offset is None else positions + self.rope_offset[rows.long()]

    def windows(self, rows: Tensor, positions: Tensor) -> list[KVPlaces]:
        """Return where layers of window groups find K and V of `positions` [n] in `rows` [n]."""
        tables = self.slot_tables[1:].unbind()
        if not tables:
            return []
        index = rows.long() * self.slot_table.shape[1] + positions
        return [KVPlaces(table.view(-1)[index], table) for table in tables]

    def advance(self, rows: Tensor, tokens: Tensor, counts: Tensor | None = None) -> None:
        """Store the sampled `tokens` int64 [n] of `rows` int64 [n]; `counts` int32 [n] is 0 for padding."""
        advance(rows, tokens, counts, self.last_token, self.length)
