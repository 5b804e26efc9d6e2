"""The ranks that run one model together, and their collective operations. Imports torch only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from qrt.errors import ConfigError
from qrt.kernels.peer_memory import Memory

START_SECONDS = 1800  # time for the slowest rank to load its part and to compile
OWN_ROWS_BYTES = 8 << 20  # least bytes in 16 bits of a sum of which each rank may take its own rows alone
INT8_BYTES = 2 << 20  # the same where what ranks add up crosses the link in int8
EXACT_TOKENS = 4  # most tokens whose sums cross a GPU's link in fp32; those of more cross it in their dtype
LOCAL = {  # nothing listens beyond this machine, and no NVLink multicast: a fault of it outlives the process
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # its watchdog would end a process whose peers compile
}

# names of torch 2.13, and those of earlier releases
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class TensorParallelGroup:
    """One rank's view of the ranks of a model, one process each. All of them call the same methods in turn.

    rank     this one's number
    size     how many there are
    device   where its tensors are
    memory   through which kernels all-reduce a few rows (`all_reduce.choose`); None: all goes by NCCL or gloo
    int8     whether large sums cross the link in int8 (`all_reduce.reduce_scatter`)
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.memory: Memory | None = None
        self.int8 = False

    @classmethod
    def join(cls, store: Path, rank: int, size: int, device: torch.device) -> TensorParallelGroup:
        """Wait until all ranks have joined through the file `store`, and return this one's view.

        ConfigError when the process has a torch.distributed group of its own.
        """
        if dist.is_initialized():
            raise ConfigError(
                "tensor_parallel_size: expected a process without torch.distributed, got one with a group; "
                "load the model before, or in a process of its own"
            )
        for name, value in LOCAL.items():
            os.environ.setdefault(name, value)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=START_SECONDS),
            device_id=device if on_gpu else None,
        )
        peers = cls(rank, size, device)
        peers.all_reduce(torch.zeros(1, 1, device=device))  # makes a communicator, for graphs
        return peers

    @property
    def most_rows(self) -> int:
        """The most rows that are all-reduced through memory."""
        return 0 if self.memory is None else self.memory.rows

    def through(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what an operator that adds the sum of x over all ranks takes as x and `peers`.

        x is [T, K], or partial sums fp32 [S, T, K]. Where it does not fit the memory, the sum is taken here.
        """
        if self.memory is not None and self.memory.takes(x):
            return x, self.memory.words
        return self.all_reduce(x), None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of x [T, N], or of the partial sums fp32 [S, T, N], as [T, N].

        All ranks get the same bits. A sum of partial sums comes in fp32. On a GPU it may take the place of x.
        """
        if x.dim() == 3:
            x = x.sum(0)
        if x.device.type == "cpu":
            parts = self._gathered(x)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            return total.to(x.dtype)
        total = x.float() if len(x) <= EXACT_TOKENS else x.contiguous()
        dist.all_reduce(total)
        return total.to(x.dtype)

    def prefers_reduce_scatter(self, x: Tensor) -> bool:
        """Return whether x [T, N] or [S, T, N] is so large that each rank had better sum its own rows."""
        if self.memory is not None and self.memory.takes(x):
            return False
        return 2 * x.shape[-2] * x.shape[-1] >= (INT8_BYTES if self.int8 else OWN_ROWS_BYTES)

    def own_rows(self, rows: int) -> slice:
        """Return which of `rows` rows are this rank's own: as many for each rank, the last may have fewer."""
        most = -(-rows // self.size)
        return slice(min(self.rank * most, rows), min((self.rank + 1) * most, rows))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's own rows of `all_reduce`."""
        if x.device.type == "cpu":
            return self.all_reduce(x)[self.own_rows(x.shape[-2])]
        if x.dim() == 3:
            x = x.sum(0)
        own, padded = self.own_rows(len(x)), _padded(x, -(-len(x) // self.size) * self.size)
        total = padded.new_empty(len(padded) // self.size, *x.shape[1:])
        _reduce_scatter(total, padded)
        return total[: own.stop - own.start]

    def all_to_all(self, x: Tensor) -> Tensor:
        """Return this rank's own rows of each rank's x [T, N], [R, T / R, N]; T is rounded up."""
        padded = _padded(x, -(-len(x) // self.size) * self.size)
        every = torch.empty_like(padded)
        dist.all_to_all_single(every, padded)
        return every.unflatten(0, (self.size, -1))

    def all_gather(self, own: Tensor, rows: int) -> Tensor:
        """Return `rows` rows [rows, ...], of which each rank has its own."""
        part = _padded(own, -(-rows // self.size))
        if part.device.type == "cpu":
            return torch.cat(list(self._gathered(part)))[:rows]
        every = part.new_empty(len(part) * self.size, *part.shape[1:])
        _all_gather(every, part)
        return every[:rows]

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all ranks side by side; x [T, N] has `widths[rank]` of them."""
        if len(set(widths)) == 1:
            parts = self._gathered(x)
        else:
            padded = x.new_zeros(len(x), max(widths))
            padded[:, : x.shape[1]] = x
            parts = [part[:, :width] for part, width in zip(self._gathered(padded), widths, strict=True)]
        return torch.cat(list(parts), dim=1)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the largest of all ranks' x, element by element, in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Give rank 0's x to all ranks, in place."""
        dist.broadcast(x, 0)
        return x

    def all_gather_int(self, number: int) -> list[int]:
        """Return the number that each rank gives, in order; this waits on the host for all of them."""
        mine = torch.tensor([number], dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return [int(one) for one in every]

    def close(self) -> None:
        """Leave the group.

        What torch has of NCCL's stays until the process ends, as its destructor never returns.
        """
        if dist.is_initialized():
            if self.device.type == "cuda":
                group = ctypes.py_object(dist.distributed_c10d._get_default_group())
                ctypes.pythonapi.Py_IncRef(group)
            dist.destroy_process_group()

    def _gathered(self, x: Tensor) -> Sequence[Tensor]:
        """Return x of each rank, all of one shape, in order."""
        every = list(x.new_empty(self.size, *x.shape))
        dist.all_gather(every, x.contiguous())
        return every


def _padded(x: Tensor, rows: int) -> Tensor:
    """Return x [T, ...], contiguous, with rows of zeros behind it up to `rows`."""
    if len(x) == rows:
        return x.contiguous()
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: len(x)] = x
    return padded
