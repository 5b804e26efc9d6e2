"""The operators of `qrt.kernels.all_reduce` on CUDA tensors. Sums are taken by the kernel of `rmsnorm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels import peer_memory
from qrt.kernels.all_reduce.device import empty, end_turn, place_of, push, take, turn_of, words_of
from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.peer_memory import Memory, ranks_of
from qrt.kernels.rmsnorm.kernel import launch_sum
from qrt.kernels.sizes import cdiv

_BLOCKS = tl.constexpr(peer_memory.BLOCKS)
_RANK = tl.constexpr(peer_memory.RANK)
_SHARED = 32  # that share a program of `_largest`


@triton.jit(do_not_specialize=["ROWS"])
def _largest(
    X, Y, PEERS, ROWS, RANKS: tl.constexpr, ASM: tl.constexpr, BLOCK: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(ROWS, BLOCK),): one int64 a row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < ROWS
    k = tl.arange(0, 1)
    words = words_of(PEERS, RANKS)
    after_previous(launch_pdl)
    largest = tl.load(X + row, mask=live, other=0)[:, None]
    turn = turn_of(words, row, live, RANKS)
    push(largest, words, turn, row, k, live[:, None], RANKS)
    largest = tl.max(take(largest, words, turn, row, k, live[:, None], RANKS, ASM), 0)
    end_turn(words, turn, row, live, RANKS)
    tl.store(Y + row, tl.max(largest, 1), mask=live)


@triton.jit(do_not_specialize=["round"])
def _probe(
    PEERS, WRONG, round, WRITE: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows,): WRITE a pattern into the places of all ranks, or count in WRONG what is not here."""
    words = words_of(PEERS, RANKS)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    turn = round + tl.zeros_like(row)
    for first in range(0, COLUMNS, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = (row >= 0)[:, None] & (k < COLUMNS)[None, :]
        at = (row * COLUMNS)[:, None].to(tl.int32) + k[None, :]
        if WRITE:
            push(at * 40503 + round * RANKS + words[_RANK].to(tl.int32), words, turn, row, k, inside, RANKS)
        else:
            for source in tl.static_range(RANKS):
                place = place_of(words[_BLOCKS], words, turn, source, row, k, tl.int32, RANKS)
                come = tl.load(place, mask=inside, other=0, volatile=True)
                wrong = inside & (come != at * 40503 + round * RANKS + source)
                tl.store(place, tl.zeros_like(come) + empty(tl.int32), mask=inside)
                tl.atomic_add(WRONG, tl.sum(tl.sum(wrong.to(tl.int32), 1), 0))


def probe(memory: Memory, wrong: Tensor, round: int, *, write: bool) -> None:
    """Write a pattern of this round to all other ranks, or add to wrong int32 [1] what has not come."""
    ranks, columns = ranks_of(memory.words), memory.row_bytes // 4
    kernel = variant(_probe, WRITE=write, RANKS=ranks, COLUMNS=columns, BLOCK=1024, num_warps=4)
    kernel.launch((memory.rows + 1,), memory.words, wrong, round)


def all_reduce(x: Tensor, peers: Tensor, dtype: torch.dtype) -> Tensor:
    """Run `qrt::all_reduce` on CUDA tensors."""
    y = torch.empty(x.shape[-2:], dtype=dtype, device=x.device)
    launch_sum(x, y, peers)
    return y


def all_reduce_max(x: Tensor, peers: Tensor) -> Tensor:
    """Run `qrt::all_reduce_max` on CUDA tensors."""
    y = torch.empty_like(x)
    if len(x):
        kernel = variant(
            _largest, RANKS=ranks_of(peers), ASM=COMPILED, BLOCK=_SHARED, num_warps=1,
            launch_pdl=overlaps(x.device),
        )  # fmt: skip
        kernel.launch((cdiv(len(x), _SHARED),), x.contiguous(), y, peers, len(x))
    return y
