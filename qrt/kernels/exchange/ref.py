"""The operators of `qrt.kernels.exchange` in torch, over the ranks of torch.distributed's group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from qrt.kernels.peer_memory import ranks_of
from qrt.kernels.peers import EXACT_TOKENS


def exchange_sum(x: Tensor, peers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of x [T, K], or fp32 [S, T, K], over S and all ranks: [T, K] in dtype."""
    x = x.sum(0) if x.dim() == 3 else x
    x = x.to(torch.float32 if len(x) <= EXACT_TOKENS else dtype)
    total = torch.zeros(x.shape, device=x.device)
    for one in _every(x, peers):
        total += one
    return total.to(dtype)


def exchange_largest(x: Tensor, peers: Tensor) -> Tensor:
    """Return the largest x int64 [T] of all ranks."""
    return torch.stack(_every(x, peers)).amax(0)


def _every(x: Tensor, peers: Tensor) -> list[Tensor]:
    """Return the x of each rank."""
    every = [torch.empty_like(x) for _ in range(ranks_of(peers))]
    dist.all_gather(every, x.contiguous())
    return every
