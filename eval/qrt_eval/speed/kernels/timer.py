"""Time an operator whose operands come from memory, and measure what this machine can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

COLD_BYTES = 256 << 20  # operands of one timing; several times the L2 cache, so each call reads memory
MAX_COPIES = 64
REPLAYS = 15
REST_S = 0.2  # before a timing; after a large product has met the power cap, clocks stay low for a while


def copies(operand_bytes: int) -> int:
    """Return how many copies of the operands are together too large for the cache."""
    return min(max(2, -(-COLD_BYTES // max(operand_bytes, 1))), MAX_COPIES)


def microseconds(
    operator: Callable[..., object],
    operands: Sequence[Sequence[Any]],
    replays: int = REPLAYS,
    rest_s: float = REST_S,
) -> float:
    """Return the median time of a call of `operator`, over calls that each have their own operands.

    On a GPU all calls form one CUDA graph, so Python launches nothing; the graph is replayed after a rest. On
    a CPU they run one after the other.
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
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
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
    """Return the dtype that the operators are timed in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Rates:
    """Hold this machine's best measured rates: bytes copied (read and written), bf16 and int8 products."""

    bytes_per_s: float
    flops_per_s: float
    int8_ops_per_s: float

    def floor_us(self, num_bytes: float, flops: float = 0, int8: bool = False) -> float:
        """Return the shortest possible time of the work; `int8` says whether its operations are int8."""
        rate = self.int8_ops_per_s if int8 else self.flops_per_s
        return max(num_bytes / self.bytes_per_s, flops / rate) * 1e6


def measure_rates(device: torch.device) -> Rates:
    """Measure a large copy, and large square products in bf16 (fp32 on a CPU) and int8."""
    gpu = device.type == "cuda"
    size, elements = (8192, 1 << 30) if gpu else (1024, 1 << 26)
    source = torch.empty(elements, dtype=torch.int32, device=device).random_()
    copy = partial(torch.bitwise_not, out=torch.empty_like(source))  # a kernel, not the copy engine
    copy_us = microseconds(copy, [(source,)])
    a = torch.randn(size, size, device=device, dtype=activation_dtype(device))
    product_us = microseconds(torch.mm, [(a, a.T)])
    flops_per_s = 2 * size**3 / product_us * 1e6
    # int8 tensor cores are twice as fast as bf16's, but torch's own int8 product does not reach that
    return Rates(8 * elements / copy_us * 1e6, flops_per_s, 2 * flops_per_s)
