"""Choose how the ranks of one host add up what they have: through each other's memory, or by NCCL.

That a GPU reaches another one's memory is tried, not believed: what the driver says is wrong on some machines
(IOMMU, virtual machines). So is which way is faster.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable

import torch

from qrt.errors import ConfigError
from qrt.kernels.all_reduce import blocks, kernel
from qrt.kernels.gpu import launches_on, multiprocessors
from qrt.kernels.peer_memory import Memory, row_bytes_for, rows_for
from qrt.kernels.rmsnorm import add_rmsnorm
from qrt.kernels.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)

ROUNDS = 100  # of the pattern through every pair
_CALLS, _REPLAYS = 20, 15  # of a timing: calls in a CUDA graph, and how often it is replayed


def choose(peers: TensorParallelGroup, width: int, wanted: str, dtype: torch.dtype) -> Memory | None:
    """Return the memory for rows of up to `width` columns, or None where NCCL does it all; say so in the log.

    wanted    peer, nccl, or auto: what is faster for one row
    All ranks call it. ConfigError when `peer` is wanted and a GPU does not reach another one's memory.
    """
    if peers.size == 1:
        return None
    if peers.device.type != "cuda" or wanted == "nccl":
        _say(peers, "all-reduce: by %s", "NCCL" if peers.device.type == "cuda" else "gloo")
        return None
    rows = rows_for(peers.size, width, multiprocessors(peers.device))
    try:
        with launches_on(peers.device):
            memory = blocks.open_memory(peers, rows, row_bytes_for(width))
            _try(peers, memory)
    except blocks.PeerError as error:
        if wanted == "peer":
            raise ConfigError(
                f"all-reduce: expected GPUs that reach each other's memory for peer, got {error}; use nccl"
            ) from error
        _say(peers, "all-reduce: by NCCL, as no GPU reaches another one's memory: %s", error)
        return None
    with launches_on(peers.device):
        through, by_nccl = _times(peers, memory, width, dtype)
    faster = through <= by_nccl or wanted == "peer"
    place = f"through peers' memory up to {rows} tokens" if faster else "by NCCL"
    text = "all-reduce: %s; one token with its norm takes %.1f us through memory, %.1f by NCCL"
    _say(peers, text, place, through, by_nccl)
    return memory if faster else None


def _say(peers: TensorParallelGroup, text: str, *values: object) -> None:
    if peers.rank == 0:
        logger.info(text, *values)


def _try(peers: TensorParallelGroup, memory: Memory) -> None:
    """Send a pattern through every pair of ranks; PeerError on all of them when it does not come."""
    wrong = torch.zeros(1, dtype=torch.int32, device=peers.device)
    for number in range(ROUNDS):
        kernel.probe(memory, wrong, number, write=True)
        torch.cuda.synchronize()
        peers.all_gather_int(0)
        kernel.probe(memory, wrong, number, write=False)
        torch.cuda.synchronize()
        peers.all_gather_int(0)
    lost = peers.all_gather_int(int(wrong))
    if any(lost):
        raise blocks.PeerError(f"{sum(lost)} words lost in {ROUNDS} rounds, by ranks: {lost}")


def _times(peers: TensorParallelGroup, memory: Memory, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the slowest rank's microseconds for one row, its sum and norm: through memory, and by NCCL."""
    x, residual = (torch.zeros(1, width, dtype=dtype, device=peers.device) for _ in range(2))
    weight = torch.ones(width, dtype=dtype, device=peers.device)

    def through() -> None:
        add_rmsnorm(residual, x, weight, 1e-5, None, 0.0, 1.0, memory.words)

    def by_nccl() -> None:
        add_rmsnorm(residual, peers.all_reduce(x), weight, 1e-5)

    first, second = (
        max(peers.all_gather_int(int(1e3 * _microseconds(call)))) / 1e3 for call in (through, by_nccl)
    )
    return first, second


def _microseconds(call: Callable[[], None]) -> float:
    """Return the median time of a call in a CUDA graph."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPLAYS)]
    for begin, end in pairs:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3 / _CALLS
