"""Steps built by hand, without the engine: what a decoder needs to run requests over token-granular slots."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.decode_attention.plan import plan_kv_splits
from qrt.kernels.step import Chunks, DecodeMeta, PrefillMeta, StepMeta
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder
from qrt.quant.kv import KV_FORMATS


class Requests:
    """Some requests of at most `max_len` tokens; the slots of each are scattered over the whole pool.

    attend_cache    as in PrefillMeta
    long            whether they turn as requests beyond `Arch.long_rope_switch` do
    """

    def __init__(
        self,
        model: Decoder,
        kv: str = "fp16",
        *,
        num: int = 1,
        max_len: int = 160,
        attend_cache: bool = False,
        long: bool = True,
    ) -> None:
        config = model.arch
        self.model = model
        self.attend_cache = attend_cache
        self.rope_offset = config.long_rope_switch if long else 0
        self.lengths = [0] * num
        formats = [KV_FORMATS[kv]] * config.num_layers
        self.storage = KVStorage(
            formats, num * max_len, config.num_kv_heads, config.head_dim, model.dtype, model.device
        )
        scattered = torch.randperm(num * max_len, generator=torch.Generator().manual_seed(7))
        self.slot_table = scattered.to(torch.int32).view(num, max_len).to(model.device)

    def run(self, work: list[tuple[int, list[int]]]) -> list[Tensor]:
        """One step: (request, its next tokens) each; requests with one token first. Logits [n, V] of each."""
        step = self._meta(work)
        hidden = self.model.hidden(step, self.storage)
        logits = self.model.logits(hidden).float()
        return list(logits.split([len(tokens) for _, tokens in work]))

    def greedy(self, prompt: list[int], steps: int) -> tuple[list[int], Tensor]:
        """Prefill request 0, then decode; the tokens chosen and the logits [steps, V] that chose them."""
        rows = [self.run([(0, prompt)])[0][-1]]
        for _ in range(steps - 1):
            rows.append(self.run([(0, [int(rows[-1].argmax())])])[0][-1])
        logits = torch.stack(rows)
        return logits.argmax(-1).tolist(), logits

    def _meta(self, work: list[tuple[int, list[int]]]) -> StepMeta:
        decodes = [row for row, tokens in work if len(tokens) == 1]
        chunks = [(row, len(tokens)) for row, tokens in work if len(tokens) > 1]
        assert [row for row, _ in work] == decodes + [row for row, _ in chunks]
        positions = [self.lengths[row] + i for row, tokens in work for i in range(len(tokens))]
        rows = [row for row, tokens in work for _ in tokens]
        for row, tokens in work:
            self.lengths[row] += len(tokens)
        return StepMeta(
            tokens=self._ints([t for _, tokens in work for t in tokens], torch.int64),
            positions=self._ints(positions),
            slots=self.slot_table[self._ints(rows).long(), self._ints(positions).long()],
            slot_table=self.slot_table,
            decode=self._decode(decodes) if decodes else None,
            prefill=self._prefill(len(decodes), chunks) if chunks else None,
            rope_positions=self._ints(positions) + self.rope_offset if self.rope_offset else None,
        )

    def _decode(self, rows: list[int]) -> DecodeMeta:
        kv_lens = self._ints([self.lengths[row] for row in rows])
        at = self._ints(rows)
        heads_per_sm = self.storage.heads_per_sm(len(rows), self.model.arch.num_heads)
        heads = self.model.arch.num_kv_heads
        reaches = self.model.arch.reaches
        kv_splits = [plan_kv_splits(at, kv_lens, heads, heads_per_sm, *reach) for reach in reaches]
        return DecodeMeta(at, kv_lens, kv_splits, newest=True)

    def _prefill(self, decodes: int, chunks: list[tuple[int, int]]) -> PrefillMeta:
        rows, lengths = zip(*chunks, strict=True)
        starts = [self.lengths[row] - length for row, length in chunks]
        own = Chunks(rows, lengths, starts, self.model.queries, decodes, self.attend_cache)
        return PrefillMeta.of(own, self.model.device)

    def _ints(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.model.device)
