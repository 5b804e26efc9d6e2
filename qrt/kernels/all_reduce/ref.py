"""The operators of `qrt.kernels.all_reduce` in torch, over the ranks of torch.distributed's group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from qrt.kernels.peer_memory import ranks_of
from qrt.kernels.tensor_parallel import EXACT_TOKENS
from qrt.quant import affine

INT8_GROUP = 128  # columns that share a scale where what ranks add up crosses the link in int8


def all_reduce(x: Tensor, peers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of x [T, K], or fp32 [S, T, K], over S and all ranks: [T, K] in dtype."""
    x = x.sum(0) if x.dim() == 3 else x
    x = x.to(torch.float32 if len(x) <= EXACT_TOKENS else dtype)
    total = torch.zeros(x.shape, device=x.device)
    for one in _every(x, peers):
        total += one
    return total.to(dtype)


def all_reduce_max(x: Tensor, peers: Tensor) -> Tensor:
    """Return the largest x int64 [T] of all ranks."""
    return torch.stack(_every(x, peers)).amax(0)


def pack_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, K] as codes int8 [T, K] and scale fp32 [T, K / INT8_GROUP]."""
    codes, scale = affine.quantize_tokens(x.unflatten(1, (-1, INT8_GROUP)))
    return codes.flatten(1), scale.squeeze(-1)


def unpack_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over R of codes int8 [R, T, K] times scale fp32 [R, T, K / INT8_GROUP]: [T, K]."""
    total = torch.zeros(codes.shape[1:], device=codes.device)
    for own, its_scale in zip(codes, scale, strict=True):
        total += affine.decode_groups(own, its_scale, 0.0)
    return total.to(dtype)


def _every(x: Tensor, peers: Tensor) -> list[Tensor]:
    """Return the x of each rank."""
    every = [torch.empty_like(x) for _ in range(ranks_of(peers))]
    dist.all_gather(every, x.contiguous())
    return every
