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
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.exchange import ref
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


def total(x: Tensor, peers: Peers) -> Tensor:
    """Return the sum of all ranks' x [T, K], in its dtype: through memory if x fits it, else by the group."""
    x, words = peers.through(x)
    return x if words is None else exchange_sum(x, words, x.dtype)


def largest(x: Tensor, peers: Peers) -> Tensor:
    """Return the largest x int64 [T] of all ranks: through memory if x fits it, else by the group."""
    memory = peers.memory
    if memory is not None and len(x) <= memory.rows:
        return exchange_largest(x, memory.words)
    return peers.most(x.clone())
