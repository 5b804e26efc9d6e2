"""`all_reduce`, `all_reduce_max`: the sum and the largest of what the ranks of one host have, in one launch.

all_reduce(x [T, K], peers, dtype) -> the sum of x over all ranks, [T, K] in dtype
    x may also be fp32 [S, T, K]: then its sum over S is what a rank has. Sums are fp32, in the order of the
    ranks, so that all of them get the same bits. What a rank has crosses the link in dtype, or if it has at
    most EXACT_TOKENS rows, in fp32; one rank may have partial sums of it, and another not
all_reduce_max(x int64 [T], peers) -> the largest x of all ranks, row by row, [T]
    the low half of a number must not be 0x80008000

`peers` is `Memory.words` (qrt.kernels.peer_memory), as `TensorParallelGroup.through` gives it. All
ranks call the same operators in the same order, with the same T and K, no larger than the memory takes.

The operators of `rmsnorm` and `layernorm` that add x to a residual take `peers` too: then they add the sum of
all ranks' x: the all-reduce is part of that launch.

The definition gathers by torch.distributed. On a GPU a rank writes what it has straight into the memory of
the others. Where one does not come, the kernel traps after the time that the words say, and CUDA reports an
error: the process cannot go on.

Large sums may cross the link in int8, between NCCL's kernels (`reduce_scatter`):

pack_int8(x [T, K]) -> codes int8 [T, K], scale fp32 [T, K / G]
    x rounded in groups of G = INT8_GROUP of its columns by `affine.quantize_tokens`
unpack_int8(codes int8 [R, T, K], scale fp32 [R, T, K / G], dtype) -> [T, K] in dtype
    the sum of what R ranks have packed, fp32 in their order
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.all_reduce import ref
from qrt.kernels.all_reduce.ref import INT8_GROUP
from qrt.kernels.op import define
from qrt.kernels.tensor_parallel import TensorParallelGroup


def _fake_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[-2:], dtype=dtype)


def _fake_largest(x: Tensor) -> Tensor:
    return torch.empty_like(x)


all_reduce = define(
    ref.all_reduce,
    triton="qrt.kernels.all_reduce.kernel:all_reduce",
    fake=_fake_sum,
)

all_reduce_max = define(
    ref.all_reduce_max,
    triton="qrt.kernels.all_reduce.kernel:all_reduce_max",
    fake=_fake_largest,
)


def _fake_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(len(x), x.shape[1] // INT8_GROUP, dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.int8), scale


def _fake_unpack(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape[1:], dtype=dtype)


pack_int8 = define(
    ref.pack_int8,
    triton="qrt.kernels.all_reduce.int8_kernel:pack_int8",
    fake=_fake_pack,
)

unpack_int8 = define(
    ref.unpack_int8,
    triton="qrt.kernels.all_reduce.int8_kernel:unpack_int8",
    fake=_fake_unpack,
)


def reduce_scatter(x: Tensor, peers: TensorParallelGroup) -> Tensor:
    """Return this rank's own rows of the sum of all ranks' x [T, K] or fp32 [S, T, K]; in int8 if asked."""
    if not peers.int8:
        return peers.reduce_scatter(x)
    x = x.sum(0) if x.dim() == 3 else x
    own = peers.own_rows(len(x))
    codes, scale = (peers.all_to_all(part) for part in pack_int8(x))
    return unpack_int8(codes, scale, x.dtype)[: own.stop - own.start]


def through(x: Tensor, peers: TensorParallelGroup) -> tuple[Tensor, Tensor | None]:
    """Do as `TensorParallelGroup.through`, in int8 if asked."""
    if peers.int8 and peers.prefers_reduce_scatter(x):
        return peers.all_gather(reduce_scatter(x, peers), x.shape[-2]), None
    return peers.through(x)


def reduce(x: Tensor, peers: TensorParallelGroup) -> Tensor:
    """Return the sum of all ranks' x [T, K], in its dtype: through memory if x fits it, else by the group."""
    x, words = through(x, peers)
    return x if words is None else all_reduce(x, words, x.dtype)


def reduce_max(x: Tensor, peers: TensorParallelGroup) -> Tensor:
    """Return the largest x int64 [T] of all ranks: through memory if x fits it, else by the group."""
    memory = peers.memory
    if memory is not None and len(x) <= memory.rows:
        return all_reduce_max(x, memory.words)
    return peers.all_reduce_max(x.clone())
