"""Measure the memory that a step takes besides weights and K/V, by running the largest one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.plan import Admission, Chunk, Placement, Plan, SamplingRules, Scoring
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.graphs import TokenSteps
from qrt.engine.step.runner import SCORED_ROWS, Runner
from qrt.engine.step.table import RequestTable
from qrt.mem.storage import KVStorage
from qrt.mem.windows import LayerGroups
from qrt.model.decoder import Decoder
from qrt.quant.kv.base import KVFormat


def peak_step_bytes(
    model: Decoder,
    formats: Sequence[KVFormat],
    limits: Limits,
    smoothing: Sequence[Tensor] | None,
    rows: Sequence[int],
    tokens: Sequence[int],
    groups: LayerGroups,
) -> int:
    """Return the bytes of GPU memory that steps take besides weights and K/V.

    They are those of the request table, of the most expensive step, and of the largest recorded step (of the
    sizes `rows` and `tokens`, as in TokenSteps), which has memory of its own. The copies of cached K and V
    that prefill makes are computed, not measured.
    """
    from qrt.kernels.launch import compiling  # imports Triton, which is installed only with GPUs

    config, slots = model.arch, [limits.max_num_batched_tokens] * len(groups.windows)
    heads, dim = config.num_kv_heads, config.head_dim
    shape = slots, heads, dim, model.dtype, model.device
    kv = KVStorage(formats, *shape, smoothing, groups=groups.of_layer)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    table = RequestTable.of(limits, kv.slots, model.device)
    adjustments = Adjustments(config.vocab_size, (), model.device)
    runner, plan = Runner(model, kv, table, adjustments), largest_plan(limits, len(slots))
    with compiling():
        runner.launch(plan).result()
    runner.launch(plan).result()
    largest = torch.cuda.max_memory_allocated(model.device) - before
    largest += 2 * limits.max_cached_tokens * heads * dim * model.dtype.itemsize
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    steps = TokenSteps(model, kv, table, rows, tokens)
    with compiling():
        steps.run_largest()
    steps.run_largest()
    return largest + torch.cuda.max_memory_allocated(model.device) - before


def largest_plan(limits: Limits, groups: int = 1) -> Plan:
    """Return the step with the most tokens and requests that the limits allow, and the costliest sampling.

    The first request is also scored. The slots are 0, 1, 2, ... in each of the `groups` of layers.
    """
    tokens = limits.max_num_batched_tokens
    requests = min(limits.max_num_seqs, tokens)
    tokens = min(tokens, requests * limits.max_model_len)
    sampling = SamplingRules(temperature=1.0, top_k=0, top_p=0.9, seed=0, num_logprobs=1)
    chunks: list[Chunk] = []
    placed: list[Placement] = []
    done = 0
    for row in range(requests):
        size = min(limits.max_model_len, tokens - done - (requests - row - 1))
        ids = np.zeros(size, np.int32)
        scoring = Scoring(0, ids[:SCORED_ROWS], 1) if row == 0 else None
        slots = np.arange(done, done + size, dtype=np.int32)
        placed += [Placement(row, 0, slots, group) for group in range(groups)]
        chunks.append(Chunk(str(row), row, 0, ids, True, sampling, (), scoring))
        done += size
    admitted = tuple(Admission(chunk.row, sampling, chunk.tokens) for chunk in chunks)
    return Plan(admitted, tuple(placed), (), tuple(chunks))
