"""`exchange_sum`, `exchange_largest`: what the ranks of one host have, put together in one launch.

exchange_sum(x [T, K], peers, dtype) -> the sum of x over all ranks, [T, K] in dtype
    x may also be fp32 [S, T, K]: then its sum over S is what a rank has. Sums are fp32, in the order of the
    ranks, so that all of them get the same bits. What a rank has crosses the link in dtype, or if it has at
    most EXACT_TOKENS rows, in fp32; one rank may have shares of it, and another not
exchange_largest(x int64 [T], peers) -> the largest x of all ranks, row by row, [T]
    the low half of a number must not be 0x80008000

`peers` is `Memory.words` (qrt.kernels.peer_memory), as `Peers.through` gives it. All ranks call the same
operators in the same order, with the same T and K, and these are no larger than the memory takes.

The operators of `rmsnorm` and `layernorm` that add x to a residual take `peers` too: then they add the sum of
all ranks' x. That is the same exchange, in the same launch.

The definition gathers by torch.distributed. On a GPU a rank writes what it has straight into the memory of
the others. Where one does not come, the kernel traps after the time that the words say, and CUDA reports an
error: the process cannot go on.

Large sums may cross the link in int8, between NCCL's kernels (`own_sum`):

exchange_pack(x [T, K]) -> codes int8 [T, K], scale fp32 [T, K / G]
    x rounded in groups of G = INT8_GROUP of its columns by `affine.quantize_tokens`
exchange_unpack(codes int8 [R, T, K], scale fp32 [R, T, K / G], dtype) -> [T, K] in dtype
    the sum of what R ranks have packed, fp32 in their order
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.exchange import ref
from qrt.kernels.exchange.ref import INT8_GROUP
from qrt.kernels.op import define
from qrt.kernels.peers import Peers


def _fake_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[-2:], dtype=dtype)


def _fake_largest(x: Tensor) -> Tensor:
    return torch.empty_like(x)


exchange_sum = define(
    ref.exchange_sum,
    triton="qrt.kernels.exchange.kernel:exchange_sum",
    fake=_fake_sum,
)

exchange_largest = define(
    ref.exchange_largest,
    triton="qrt.kernels.exchange.kernel:exchange_largest",
    fake=_fake_largest,
)


def _fake_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(len(x), x.shape[1] // INT8_GROUP, dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.int8), scale


def _fake_unpack(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape[1:], dtype=dtype)


exchange_pack = define(
    ref.exchange_pack,
    triton="qrt.kernels.exchange.int8_kernel:exchange_pack",
    fake=_fake_pack,
)

exchange_unpack = define(
    ref.exchange_unpack,
    triton="qrt.kernels.exchange.int8_kernel:exchange_unpack",
    fake=_fake_unpack,
)


def own_sum(x: Tensor, peers: Peers) -> Tensor:
    """Return this rank's own rows of the sum of all ranks' x [T, K] or fp32 [S, T, K]; in int8 if asked."""
    if not peers.int8:
        return peers.sum_own(x)
    x = x.sum(0) if x.dim() == 3 else x
    own = peers.own(len(x))
    codes, scale = (peers.swap(part) for part in exchange_pack(x))
    return exchange_unpack(codes, scale, x.dtype)[: own.stop - own.start]


def through(x: Tensor, peers: Peers) -> tuple[Tensor, Tensor | None]:
    """Do as `Peers.through`, in int8 if asked."""
    if peers.int8 and peers.takes_own(x):
        return peers.whole(own_sum(x, peers), x.shape[-2]), None
    return peers.through(x)


def total(x: Tensor, peers: Peers) -> Tensor:
    """Return the sum of all ranks' x [T, K], in its dtype: through memory if x fits it, else by the group."""
    x, words = through(x, peers)
    return x if words is None else exchange_sum(x, words, x.dtype)


def largest(x: Tensor, peers: Peers) -> Tensor:
    """Return the largest x int64 [T] of all ranks: through memory if x fits it, else by the group."""
    memory = peers.memory
    if memory is not None and len(x) <= memory.rows:
        return exchange_largest(x, memory.words)
    return peers.most(x.clone())
