"""Graphs: steps padded to some sizes and recorded as CUDA graphs; a step is two launches for the host.

There are two kinds of steps. A step of decodes alone is one graph, from the request table to the next tokens
in it. A step with chunks of prompts is two graphs: one from tokens to hidden states, and one that makes the
logits of the rows that sample, samples them and advances the request table. A graph depends on its size
alone. Tokens, rows, chunks and tiles of attention are in one tensor of inputs (`PaddedInputs`). It is sent in
one copy, and for decodes alone only when the rows change.

Rows with rules beyond temperature and seed are sampled outside the graph, from the hidden states. Padding
tokens belong to the table's last row: they attend nothing and write the pad slot. With `--enforce-eager`
nothing is recorded and the same padded steps run kernel by kernel, so that both give the same tokens.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from tqdm import tqdm

from qrt.engine.schedule.plan import Plan
from qrt.engine.step.masks import MaskBuffer
from qrt.engine.step.padded import PaddedInputs
from qrt.engine.step.table import RequestTable
from qrt.gc import garbage_left
from qrt.kernels.all_reduce import reduce_max
from qrt.kernels.sample import packed_samples, token_of
from qrt.kernels.sample import sample as sample_logits
from qrt.mem.sizing import GIB
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder

logger = logging.getLogger(__name__)

LARGEST = 2048  # most decoding rows of a recorded step, by default
ALONE = 2048  # most tokens of a step of prompts alone that has a graph of its own, without decodes
NUM_CACHED = 1 << 15  # most cached tokens of a padded step, by default; steps with more take long anyway


def default_rows(max_num_seqs: int) -> list[int]:
    """Return the sizes of decode steps, each a few percent above the one before.

    The last one holds `max_num_seqs`, or is LARGEST.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, 1024, 64)]
    sizes += range(1024, LARGEST + 1, 128)
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < max_num_seqs]


def default_tokens(max_num_batched_tokens: int) -> list[int]:
    """Return the sizes of steps with prompts, up to `max_num_batched_tokens`.

    They are multiples of the rows that a matrix product computes at a time.
    """
    sizes = [16, 32, *range(64, 512, 64), *range(512, 1024, 128), *range(1024, 4096, 256)]
    sizes += range(4096, 8193, 512)
    most = min(max_num_batched_tokens, sizes[-1])
    return [*(size for size in sizes if size < most), most]


@cache
def _recording(device: torch.device) -> torch.cuda.Stream:
    """Return the stream to record on; torch's default one belongs to the device of the first graph."""
    return torch.cuda.Stream(device)


class TokenSteps:
    """Runs padded steps over one model, K/V storage and request table.

    rows          sizes of steps of decodes alone, and of the sampled rows of any step
    tokens        sizes of steps with chunks of prompts
    num_cached    most cached tokens that the chunks of a step attend
    attend_cache  as in PrefillMeta
    masks         what `sample_masked` reads
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVStorage,
        table: RequestTable,
        rows: Sequence[int],
        tokens: Sequence[int] = (),
        *,
        num_cached: int = NUM_CACHED,
        attend_cache: bool = False,
    ) -> None:
        self._model = model
        self._kv = kv
        self._table = table
        self.rows = sorted(set(rows))
        self.tokens = sorted(set(tokens))
        self._num_cached = num_cached
        self._attend_cache = attend_cache
        config, most = model.arch, max([*self.rows, *self.tokens])
        self._inputs = PaddedInputs(
            self.rows[-1], most, model, kv, table, num_cached=num_cached, attend_cache=attend_cache
        )
        most_samples = max(self.rows[-1], table.pad_row)
        self.masks = MaskBuffer(most_samples, model.arch.vocab_size, table.device)
        self._sent: list[int] | None = None  # rows on the device, if it has a step of decodes alone
        self._hidden = torch.zeros(most, config.hidden_size, dtype=model.dtype, device=table.device)
        heads = most if self.tokens else 0, config.num_heads, config.head_dim
        self._attended = torch.zeros(heads, dtype=model.dtype, device=table.device)
        # keyed by name: bound methods would keep the model and the pool alive until garbage is collected
        self._recorded: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def handles(self, plan: Plan) -> bool:
        """Return whether the plan fits a padded step."""
        if len(plan.sampled) > self.rows[-1] or any(chunk.scoring for chunk in plan.chunks):
            return False
        if not plan.chunks:
            return True
        cached = sum(chunk.end if self._attend_cache else chunk.start for chunk in plan.chunks)
        return cached <= self._num_cached and self._size(plan) is not None

    def is_recorded(self, plan: Plan) -> bool:
        """Return whether a plan that `handles` accepts is replayed, not launched kernel by kernel."""
        return (self._body(plan).__name__, self._size(plan)) in self._recorded

    @torch.inference_mode()
    def record(self) -> None:
        """Record every size, the largest first, so that the others fit into its memory."""
        started, device = time.perf_counter(), self._table.device
        before = torch.cuda.memory_reserved(device)
        pool, stream = torch.cuda.graph_pool_handle(), _recording(device)
        # NCCL's own threads may call CUDA while a graph of several ranks is recorded
        mode = "global" if self._model.peers is None else "thread_local"
        steps = self._steps()
        self._compile(steps)
        for body, size in tqdm(steps, desc="Recording CUDA graphs", unit="graph"):
            self._pad(body, size)
            graph = torch.cuda.CUDAGraph()
            with garbage_left(), torch.cuda.graph(graph, pool, stream, mode):
                result = body(size)
            self._recorded[body.__name__, size] = graph, result
        took, memory = time.perf_counter() - started, torch.cuda.memory_reserved(device) - before
        logger.info("recorded %d CUDA graphs: %.1f s, %.2f GiB", len(steps), took, memory / GIB)

    def _compile(self, steps: Sequence[tuple[Callable[[int], Tensor], int]]) -> None:
        """Compile the kernels of all steps, several at a time, and load them.

        The first layers are enough: the other layers use the same kernels.
        """
        from qrt.kernels.launch import compiling  # imports Triton, which is installed only with GPUs

        whole, self._model = self._model, self._model.of_layers(self._distinct_layers())
        try:
            with compiling():
                self._run_all(steps)
            self._run_all(steps)
            torch.cuda.synchronize(self._table.device)
        finally:
            self._model = whole

    def _run_all(self, steps: Sequence[tuple[Callable[[int], Tensor], int]]) -> None:
        """Run each step on padding alone, kernel by kernel."""
        for body, size in steps:
            self._pad(body, size)
            body(size)

    def _distinct_layers(self) -> int:
        """Return how many of the first layers hold every kind of layer and every pair of neighbours."""
        kinds = [
            (
                self._kv.layer(i).format,
                layer.attention.scores.plan,
                len(self._model.ropes[i].cos),
                type(layer.mlp),
                *(linear.scheme for linear in layer.linears()),
            )
            for i, layer in enumerate(self._model.layers)
        ]
        pairs = list(pairwise([*kinds, None]))
        return min(len(kinds), 2 + max(pairs.index(pair) for pair in pairs[:-1])) if len(pairs) > 1 else 1

    def forget(self) -> None:
        """Drop what was recorded, once it has run: NCCL does not let go of a group that graphs still use."""
        if self._recorded:
            torch.cuda.synchronize(self._table.device)
            self._recorded.clear()

    @torch.inference_mode()
    def run_largest(self) -> None:
        """Run the largest steps on padding alone, kernel by kernel, to measure their memory."""
        for body, sizes in ((self._mixed, self.tokens), (self._step, self.rows)):
            for size in sizes[-1:]:
                self._pad(body, size)
                body(size)

    def send(self, plan: Plan) -> None:
        """Send the inputs of the step, unless the device has them."""
        rows = [decode.row for decode in plan.decodes]
        if not plan.chunks and rows == self._sent:
            return
        self._sent = None  # in case an interrupt comes before the last line
        size, samples = self._size(plan), _holds(self.rows, len(plan.sampled))
        assert size is not None and samples is not None, "a plan that is not handled"
        self._inputs.send(plan, size, samples)
        self._sent = None if plan.chunks else rows

    def forward(self, plan: Plan) -> Tensor:
        """Return the hidden states [T, H] of the sent tokens, valid until the next call."""
        return self._run(self._body(plan, forward=True), self._size(plan))[: _count(plan)]

    def sample(self, plan: Plan) -> Tensor:
        """Run the sent step, sample by temperature and seed, and advance the request table.

        Returns tokens int64 [S], one for each of `plan.sampled`.
        """
        if plan.chunks:
            self.forward(plan)
            tokens = self._run(self._sample, _holds(self.rows, len(plan.sampled)))
        else:
            tokens = self._run(self._step, self._size(plan))
        return tokens[: len(plan.sampled)].clone()  # the graph writes the same memory again

    def sample_masked(self, plan: Plan) -> Tensor:
        """Sample as `sample` does after `forward`, by the masks that have been sent."""
        tokens = self._run(self._sample_masked, _holds(self.rows, len(plan.sampled)))
        return tokens[: len(plan.sampled)].clone()

    def _steps(self) -> list[tuple[Callable[[int], Tensor], int]]:
        """Return the steps to record, in order."""
        alone = [size for size in self.tokens if size <= ALONE]
        bodies = {
            self._mixed: self.tokens, self._prompts: alone, self._forward: self.rows, self._sample: self.rows,
            self._sample_masked: self.rows, self._step: self.rows,
        }  # fmt: skip
        return [(body, size) for body, sizes in bodies.items() for size in sizes[::-1]]

    def _body(self, plan: Plan, *, forward: bool = False) -> Callable[[int], Tensor]:
        """Return what a plan runs: up to the tokens for decodes alone, else up to the hidden states.

        With `forward` it stops at the hidden states in any case.
        """
        if not plan.chunks:
            return self._forward if forward else self._step
        size = self._size(plan)
        assert size is not None, "a plan that is not handled"
        return self._mixed if plan.decodes or size > ALONE else self._prompts

    def _run(self, body: Callable[[int], Tensor], size: int | None) -> Tensor:
        """Replay the recorded graph; without one, run kernel by kernel."""
        assert size is not None, "a plan that is not handled"
        if recorded := self._recorded.get((body.__name__, size)):
            graph, result = recorded
            graph.replay()
            return result
        return body(size)

    def _size(self, plan: Plan) -> int | None:
        """Return the size to which a plan is padded; None if none is large enough."""
        if not plan.chunks:
            return _holds(self.rows, len(plan.decodes))
        index = bisect_left(self.tokens, _count(plan))
        enough = (n for n in self.tokens[index:] if self._inputs.num_chunks(n) >= len(plan.chunks))
        return next(enough, None)

    def _pad(self, body: Callable[[int], Tensor], size: int) -> None:
        """Set the inputs to padding alone."""
        self._inputs.pad(size, chunks=body in (self._mixed, self._prompts))
        self._sent = None

    def _forward(self, size: int) -> Tensor:
        return self._hidden[:size].copy_(self._decode(size))

    def _step(self, size: int) -> Tensor:
        return self._next_tokens(self._decode(size), size)

    def _sample(self, size: int) -> Tensor:
        return self._next_tokens(self._hidden[self._inputs.samples(size)[0].long()], size)

    def _sample_masked(self, size: int) -> Tensor:
        hidden = self._hidden[self._inputs.samples(size)[0].long()]
        return self._next_tokens(hidden, size, self.masks.masks, self.masks.at[:size])

    def _decode(self, size: int) -> Tensor:
        """Return the hidden states [size, H] of decodes alone."""
        return self._model.hidden(self._inputs.decodes(size), self._kv)

    def _mixed(self, size: int) -> Tensor:
        """Return the hidden states [size, H] of decodes, at most `rows[-1]`, and chunks."""
        return self._with_chunks(size, min(size, self.rows[-1]))

    def _prompts(self, size: int) -> Tensor:
        """Return the hidden states [size, H] of chunks alone."""
        return self._with_chunks(size, 0)

    def _with_chunks(self, size: int, decodes: int) -> Tensor:
        step = self._inputs.chunks(size, decodes, self._attended[:size])
        return self._hidden[:size].copy_(self._model.hidden(step, self._kv))

    def _next_tokens(
        self, hidden: Tensor, size: int, masks: Tensor | None = None, mask_at: Tensor | None = None
    ) -> Tensor:
        table, model, (_, rows, counts) = self._table, self._model, self._inputs.samples(size)
        rows = rows.long()
        rules = rows, table.temperature, table.seed, table.length
        if model.peers is None:
            tokens = sample_logits(model.logits(hidden), *rules, None, masks, mask_at)
        elif masks is None:
            words = packed_samples(model.own_logits(hidden), *rules, model.first_token)
            tokens = token_of(reduce_max(words, model.peers))
        else:  # only rank 0 has masks
            tokens = model.peers.broadcast(sample_logits(model.logits(hidden), *rules, None, masks, mask_at))
        table.advance(rows, tokens, counts)
        return tokens


def _count(plan: Plan) -> int:
    """Return the number of tokens of a step."""
    return len(plan.decodes) + sum(len(chunk.tokens) for chunk in plan.chunks)


def _holds(sizes: Sequence[int], count: int) -> int | None:
    """Return the smallest of the sorted `sizes` that holds `count`; None if none does."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
