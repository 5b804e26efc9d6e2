"""Graphs: steps of few tokens, and chunks alone, padded to some sizes and recorded as CUDA graphs.

In such a step every token attends through the cache, on its own: those that decode, and the few of a short
prompt (or of a prompt's last piece), which would otherwise cost the host hundreds of launches. A recorded
step costs it two, whatever the model: one graph from tokens to hidden states, and one that makes the logits
of the rows that sample, draws and advances the request table; for decodes alone both are one. Those find
everything in the table; their rows travel when they are others than in the step before. A chunk of some more
tokens that comes alone is recorded too, with the kernels of prefill: up to 2,048 tokens the GPU is done
before the host could launch them one by one.

Rows that ask for more than greedy, temperature and seed are drawn outside, from the hidden states. Padding
tokens are of the table's last row: they attend nothing and write the pad slot. Where nothing is recorded
(`--enforce-eager`, a CPU) the same padded steps run kernel by kernel, so that the tokens do not depend on it.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from qrt.engine.plan import Plan
from qrt.engine.table import RequestTable
from qrt.engine.transfer import to_device
from qrt.kernels.sample import sample as draw
from qrt.kernels.step import DecodeMeta, PrefillMeta, StepMeta
from qrt.kernels.token_inputs import token_inputs
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder

LARGEST = 256  # rows that decode, by default
PROMPT_SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)  # tokens of steps with prompts, by default
CHUNK_SIZES = (640, 768, 896, 1024, 1280, 1536, 1792, 2048)  # of a chunk alone, by default
CHUNK_CACHED = 8192  # most tokens before it: there is room for all of them in its graph
# Most tokens that a step's prompt tokens read together. Each reads its context alone: beyond this the kernels
# of prefill, which read it once for all, are faster than the launches they cost.
PROMPT_READS = 256 * 1024
TABLE = -1  # of an input: what the request table says


def default_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256 or the first that holds `max_num_seqs`: rows that decode."""
    sizes = [1, 2, 4, *range(8, LARGEST + 1, 8)]
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < max_num_seqs]


@contextmanager
def _garbage_left() -> Iterator[None]:
    """No garbage is collected: a graph in it, of an engine that is gone, cannot be destroyed while another is
    recorded."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@cache
def _recording(device: torch.device) -> torch.cuda.Stream:
    """The stream of what is recorded; torch's is of the device on which the first graph was."""
    return torch.cuda.Stream(device)


class TokenSteps:
    """Steps of few tokens over one model, K/V storage and request table.

    rows     sizes of what samples: steps of that many decodes, and the rows drawn of any step
    tokens   sizes of whole steps, `rows` among them
    chunks   sizes of chunks that are a step's only work, more tokens than those
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVStorage,
        table: RequestTable,
        rows: Sequence[int],
        prompts: Sequence[int] = (),
        chunks: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._kv = kv
        self._table = table
        self.rows = sorted(set(rows))
        self.tokens = sorted({*rows, *prompts})
        self.chunks = sorted(size for size in chunks if size > self.tokens[-1])
        device, most = table.device, [*self.tokens, *self.chunks][-1]
        # of each token: its row, its position and itself (TABLE: of the row); what is drawn: token, row
        self._tokens = torch.empty(3, most, dtype=torch.int32, device=device)
        self._draws = torch.empty(2, self.rows[-1], dtype=torch.int64, device=device)
        self._drawn = torch.empty(self.rows[-1], dtype=torch.int32, device=device)  # 1, and 0 of padding
        self._sent: list[int] | None = None  # the rows of a step of decodes alone that the device knows
        self._hidden = torch.zeros(most, model.config.hidden_size, dtype=model.dtype, device=device)
        # by names: methods would keep this, the model and the pool alive until garbage is collected
        self._recorded: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def handles(self, plan: Plan) -> bool:
        """Whether the plan is such a step."""
        if any(chunk.scoring for chunk in plan.chunks):
            return False
        if not plan.chunks:
            return len(plan.decodes) <= self.rows[-1]
        if self._is_chunk(plan):
            return True
        tokens = _count(plan)
        reads = sum(len(chunk.tokens) * chunk.end for chunk in plan.chunks)
        return tokens <= self.tokens[-1] and len(plan.sampled) <= self.rows[-1] and reads <= PROMPT_READS

    @torch.inference_mode()
    def record(self) -> None:
        """Record every size, the largest first: the others fit into its memory."""
        pool, stream = torch.cuda.graph_pool_handle(), _recording(self._table.device)
        self._pad()
        bodies = {
            self._prefill: self.chunks, self._forward: self.tokens, self._draw: self.rows,
            self._step: self.rows,
        }  # fmt: skip
        steps = [(body, size) for body, sizes in bodies.items() for size in sizes[::-1]]
        for body, size in tqdm(steps, desc="Recording CUDA graphs", unit="graph"):
            body(size)  # compiles the kernels
            torch.cuda.synchronize(self._table.device)
            graph = torch.cuda.CUDAGraph()
            with _garbage_left(), torch.cuda.graph(graph, pool=pool, stream=stream):
                result = body(size)
            self._recorded[body.__name__, size] = graph, result

    @torch.inference_mode()
    def run_largest(self) -> None:
        """The largest steps, of padding, kernel by kernel: what memory they take."""
        self._pad()
        for size in self.chunks[-1:]:
            self._prefill(size)
        self._forward(self.tokens[-1])
        self._draw(self.rows[-1])

    def send(self, plan: Plan) -> None:
        """Tell the device which tokens the step has, if it does not know."""
        rows = [decode.row for decode in plan.decodes]
        if not plan.chunks and rows == self._sent:
            return
        tokens, draws = self._token_inputs(plan), self._draw_inputs(plan)
        ends = np.array([(chunk.row, chunk.end) for chunk in plan.chunks], np.int32).reshape(-1, 2).T
        sent = to_device({"tokens": tokens, "draws": draws, "ends": ends}, self._table.device)
        self._sent = None  # should an interrupt come between these
        self._tokens[:, : tokens.shape[1]].copy_(sent["tokens"])
        self._draws[:, : draws.shape[1]].copy_(sent["draws"][:2])
        self._drawn[: draws.shape[1]].copy_(sent["draws"][2])
        if plan.chunks:
            self._table.length[sent["ends"][0]] = sent["ends"][1]
        self._sent = None if plan.chunks else rows

    def _token_inputs(self, plan: Plan) -> NDArray[np.int32]:
        """Of each token, padding last: its row, its position and itself, int32 [3, size]."""
        inputs = np.full((3, self._size(plan)), TABLE, np.int32)
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

    def _draw_inputs(self, plan: Plan) -> NDArray[np.int32]:
        """Of what is drawn, padding last: the token behind which, its row, and 1; int32 [3, size]."""
        inputs = np.zeros((3, _holds(self.rows, len(plan.sampled))), np.int32)
        tokens, rows, drawn = inputs
        count = len(plan.sampled)
        tokens[:count], drawn[:count] = plan.sampled_at, 1
        rows[:count] = [work.row for work in plan.sampled]
        rows[count:] = self._table.pad_row
        return inputs

    def forward(self, plan: Plan) -> Tensor:
        """Hidden states [T, H] of the tokens that were sent, good until the next call."""
        body = self._prefill if self._is_chunk(plan) else self._forward
        return self._run(body, self._size(plan))[: _count(plan)]

    def draw(self, plan: Plan) -> Tensor:
        """Tokens int64 [S] of what was sent, for each of `plan.sampled`: greedy, or by temperature and seed.
        The request table is advanced."""
        if plan.chunks:
            self.forward(plan)
            tokens = self._run(self._draw, _holds(self.rows, len(plan.sampled)))
        else:
            tokens = self._run(self._step, self._size(plan))
        return tokens[: len(plan.sampled)].clone()  # what was recorded writes the same place again

    def _run(self, body: Callable[[int], Tensor], size: int) -> Tensor:
        """As it was recorded, or kernel by kernel."""
        if recorded := self._recorded.get((body.__name__, size)):
            graph, result = recorded
            graph.replay()
            return result
        return body(size)

    def _is_chunk(self, plan: Plan) -> bool:
        """Whether it is one chunk of a size that is here."""
        if plan.decodes or len(plan.chunks) != 1 or plan.chunks[0].start > CHUNK_CACHED:
            return False
        return bool(self.chunks) and self.tokens[-1] < _count(plan) <= self.chunks[-1]

    def _size(self, plan: Plan) -> int:
        """To which it is padded."""
        if not plan.chunks:
            return _holds(self.rows, len(plan.decodes))
        return _holds(self.chunks if self._is_chunk(plan) else self.tokens, _count(plan))

    def _pad(self) -> None:
        """Inputs of padding alone."""
        self._tokens[0].fill_(self._table.pad_row)
        self._tokens[1:].fill_(TABLE)
        self._draws[0].zero_()
        self._draws[1].fill_(self._table.pad_row)
        self._drawn.zero_()
        self._sent = None

    def _forward(self, size: int) -> Tensor:
        return self._hidden[:size].copy_(self._decode(size, newest=False))

    def _step(self, size: int) -> Tensor:
        return self._sample(self._decode(size, newest=True), size)

    def _draw(self, size: int) -> Tensor:
        return self._sample(self._hidden[self._draws[0, :size]], size)

    def _decode(self, size: int, *, newest: bool) -> Tensor:
        """Hidden states [size, H]; each token attends on its own. `newest` as in `DecodeMeta`."""
        table, rows = self._table, self._tokens[0, :size]
        ids, positions, slots, kv_lens, parts = token_inputs(
            *self._tokens[:, :size],
            table.length,
            table.last_token,
            table.slot_table,
            self._model.config.num_kv_heads,
            self._kv.heads_per_sm(size, self._model.config.num_heads),
        )
        decode = DecodeMeta(rows, kv_lens, parts, newest)
        step = StepMeta(ids, positions, slots, table.slot_table, decode, None)
        return self._model.hidden(step, self._kv)

    def _prefill(self, size: int) -> Tensor:
        """A chunk alone: padding is behind it, and attends nothing."""
        table, (rows, positions, ids) = self._table, self._tokens[:, :size]
        positions = positions.clamp(min=0)
        count = (rows != table.pad_row).sum(dtype=torch.int32).view(1)
        zero, start = torch.zeros_like(count), positions[:1]
        room = min(CHUNK_CACHED, table.slot_table.shape[1])
        prefill = PrefillMeta(
            rows=rows[:1],
            kv_lens=start + count,
            query_start=torch.cat((zero, count)),
            cached_start=torch.cat((zero, start)),
            max_query_len=size,
            num_cached=room,
            max_cached_len=room,
        )
        slots = table.slots(rows, positions)
        step = StepMeta(ids.clamp(min=0).long(), positions, slots, table.slot_table, None, prefill)
        return self._hidden[:size].copy_(self._model.hidden(step, self._kv))

    def _sample(self, hidden: Tensor, size: int) -> Tensor:
        table, rows = self._table, self._draws[1, :size]
        tokens = draw(self._model.logits(hidden), rows, table.temperature, table.seed, table.length, None)
        table.advance(rows, tokens, self._drawn[:size])
        return tokens


def _count(plan: Plan) -> int:
    """Tokens of the step."""
    return len(plan.decodes) + sum(len(chunk.tokens) for chunk in plan.chunks)


def _holds(sizes: Sequence[int], count: int) -> int:
    """The smallest of some sorted sizes that holds `count`."""
    return sizes[bisect_left(sizes, count)]
