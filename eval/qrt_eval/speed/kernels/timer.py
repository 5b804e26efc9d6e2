"""How long an operator takes when its operands come from memory, and what this machine can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

COLD_BYTES = 256 << 20  # operands of one timing: several times the L2 cache, so that each call reads memory
MAX_COPIES = 64
REPLAYS = 15
REST_S = 0.2  # before a timing: the clocks stay low for a while when a large product has met the power cap


def copies(operand_bytes: int) -> int:
    """Distinct copies of the operands that together are too large for the cache."""
    return min(max(2, -(-COLD_BYTES // max(operand_bytes, 1))), MAX_COPIES)


def microseconds(
    operator: Callable[..., object],
    operands: Sequence[Sequence[Any]],
    replays: int = REPLAYS,
    rest_s: float = REST_S,
) -> float:
    """Median time of a call of `operator`, over calls that each have operands of their own.

    On a GPU all calls are one CUDA graph, so that nothing is launched from Python, and the graph is replayed
    after a rest of the GPU; on a CPU they run one after the other.
    """
    operator(*operands[0])  # compiles
    if not torch.cuda.is_available():
        times_s = []
        for _ in range(min(replays, 5)):
            started = time.perf_counter()
            for some in operands:
                operator(*some)
            times_s.append(time.perf_counter() - started)
        return statistics.median(times_s) / len(operands) * 1e6
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for some in operands:
                operator(*some)
        torch.cuda.synchronize()
        time.sleep(rest_s)
        for _ in range(3):
            graph.replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / len(operands) * 1e3


def activation_dtype(device: torch.device) -> torch.dtype:
    """What the operators are timed in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Rates:
    """What this machine does at best, measured: bytes copied (read and written), bf16 and int8 products."""

    bytes_per_s: float
    flops_per_s: float
    int8_ops_per_s: float

    def floor_us(self, num_bytes: float, flops: float = 0, int8: bool = False) -> float:
        """The time below which the work cannot be done; `int8`: whether its operations are."""
        rate = self.int8_ops_per_s if int8 else self.flops_per_s
        return max(num_bytes / self.bytes_per_s, flops / rate) * 1e6


def measure_rates(device: torch.device) -> Rates:
    """Rates of a large copy and of large square products in bf16 (fp32 on a CPU) and int8."""
    gpu = device.type == "cuda"
    size, elements = (8192, 1 << 30) if gpu else (1024, 1 << 26)
    source = torch.empty(elements, dtype=torch.int32, device=device).random_()
    copy = partial(torch.bitwise_not, out=torch.empty_like(source))  # a kernel; copy_ is the copy engine's
    copy_us = microseconds(copy, [(source,)])
    a = torch.randn(size, size, device=device, dtype=activation_dtype(device))
    product_us = microseconds(torch.mm, [(a, a.T)])
    flops_per_s = 2 * size**3 / product_us * 1e6
    # int8 tensor cores do twice what bf16's do; torch's own int8 product does not reach that
    return Rates(8 * elements / copy_us * 1e6, flops_per_s, 2 * flops_per_s)
