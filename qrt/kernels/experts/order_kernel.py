"""Put the assignments of tokens to experts in order by expert, each expert's padded to whole blocks.

Few assignments take one kernel, whose programs count all of them; many take two. Nothing is added atomically,
so that the order is the same in every run: by expert, then by assignment. How many places there are depends
on sizes alone: a recorded graph serves any choice.

Few are bound by latency. A program loads all of them at once, counts them in registers and stores: one way to
the L2 cache and back, and one to it. For 64 tokens that choose 8 of 128 experts a program reads 2 KB, and
each of its 128 threads compares 128 times to count (a word counts four experts), 32 times for ranks and 32
for blocks: 1,400 instructions in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import variant
from qrt.kernels.linear.shared.places import Places
from qrt.kernels.sizes import cdiv, next_power_of_2

CHUNK, MOST_CHUNK = 64, 512  # assignments of a program: at least, and at most
PROGRAMS = 64  # that have chunks at least this small, where the most allows it
MOST_PART = 128  # assignments that bytes count
FEW = 1 << 16  # most assignments times experts that every program counts,
MOST_FEW = 1024  # and most assignments


@triton.jit
def _count_chunks(CHOSEN, count, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, EP: tl.constexpr):
    """Count each expert's assignments in each chunk, [CHUNKS, EP], all at once.

    A byte counts one of four experts: a chunk has at most 255 assignments.
    """
    chunk, a, word = tl.arange(0, CHUNKS), tl.arange(0, CHUNK), tl.arange(0, EP // 4)
    at = chunk[:, None] * CHUNK + a[None, :]
    expert = tl.load(CHOSEN + at, mask=at < count, other=-1)
    one = tl.full([CHUNKS, CHUNK], 1, tl.int32) << (expert % 4 * 8)
    mine = (expert >> 2)[:, :, None] == word[None, None, :]
    words = tl.sum(tl.where(mine, one[:, :, None], 0), 1)
    counts = (words[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 255
    return tl.reshape(counts, [CHUNKS, EP])


@triton.jit(do_not_specialize=["count"])
def _count(
    CHOSEN, COUNTS, count, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    PART: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Count each expert's assignments in each chunk: COUNTS [chunks, E]; grid (chunks,)."""
    after_previous(launch_pdl)
    e, first = tl.arange(0, EP), tl.program_id(0) * CHUNK
    counts = tl.zeros([EP], tl.int32)
    for start in range(first, first + CHUNK, STEP):
        counts += tl.sum(_count_chunks(CHOSEN + start, count - start, STEP // PART, PART, EP), 0)
    tl.store(COUNTS + tl.program_id(0) * E + e, counts, mask=e < E)


@triton.jit(do_not_specialize=["count", "blocks", "each"])
def _place(
    CHOSEN, COUNTS, ORDER, EXPERTS, count, blocks, each, E: tl.constexpr, EP: tl.constexpr,
    STEP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, EACH: tl.constexpr,
    RANKED: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Place a chunk of assignments, and describe `each` of the blocks, EACH at a time; grid (chunks,).

    With COUNTS the chunks were counted. Else there are at most CHUNKS, counted here. RANKED assignments are
    compared with a chunk's at a time.
    """
    after_previous(launch_pdl)
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    e = tl.arange(0, EP)
    a = first + tl.arange(0, CHUNK)
    expert = tl.load(CHOSEN + a, mask=a < count, other=0)
    if COUNTS is None:
        counted = _count_chunks(CHOSEN, count, CHUNKS, CHUNK, EP)
        before = tl.sum(tl.where((tl.arange(0, CHUNKS) < chunk)[:, None], counted, 0), 0)
        total = tl.sum(counted, 0)
    else:
        earlier = tl.zeros([STEP, EP], tl.int32)
        everything = tl.zeros([STEP, EP], tl.int32)
        for start in range(0, tl.num_programs(0), STEP):
            c = start + tl.arange(0, STEP)
            inside = (c < tl.num_programs(0))[:, None] & (e < E)[None, :]
            counts = tl.load(COUNTS + c[:, None] * E + e[None, :], mask=inside, other=0)
            everything += counts
            earlier += tl.where((c < chunk)[:, None], counts, 0)
        before = tl.sum(earlier, 0)
        total = tl.sum(everything, 0)
    taken = (total + BM - 1) // BM
    end = tl.cumsum(taken, 0)
    begin = end - taken

    lower = tl.zeros([CHUNK, RANKED], tl.int32)  # lanes along RANKED: each loads one of the others
    for start in range(0, CHUNK, RANKED):
        others = first + start + tl.arange(0, RANKED)
        theirs = tl.load(CHOSEN + others, mask=others < count, other=-1)
        same = (theirs[None, :] == expert[:, None]) & (others[None, :] < a[:, None])
        lower += same.to(tl.int32)
    place = tl.gather(begin * BM + before, expert, 0) + tl.sum(lower, 1)
    tl.store(ORDER + place, a, mask=a < count)

    row = tl.arange(0, BM)
    for start in range(0, each, EACH):
        i = start + tl.arange(0, EACH)
        b = chunk * each + i
        real = (i < each) & (b < blocks)
        owner = tl.sum((end[:, None] <= b[None, :]).to(tl.int32), 0)
        tl.store(EXPERTS + b, tl.where(owner < E, owner, -1), mask=real)
        last = tl.gather(total + begin * BM, tl.minimum(owner, E - 1), 0)
        live = tl.where(owner < E, last - b * BM, 0)
        padding = real[:, None] & (row[None, :] >= live[:, None])
        tl.store(ORDER + b[:, None] * BM + row[None, :], tl.zeros([EACH, BM], tl.int32) + count, mask=padding)


def most_blocks(count: int, experts: int, block: int) -> int:
    """Return the most blocks of places that `count` assignments to `experts` experts take."""
    return min(count, (count + min(experts, count) * (block - 1)) // block)


def order(chosen: Tensor, experts: int, block: int) -> Places:
    """Return the places of the assignments chosen int32 [T, k], by expert, in blocks of `block` places."""
    count, device = chosen.numel(), chosen.device
    blocks = most_blocks(count, experts, block)
    places = torch.empty(blocks * block, dtype=torch.int32, device=device)
    owners = torch.empty(blocks, dtype=torch.int32, device=device)
    width, few = max(16, next_power_of_2(experts)), count <= MOST_FEW and count * experts <= FEW
    chunk = CHUNK if few else min(MOST_CHUNK, max(CHUNK, next_power_of_2(cdiv(count, PROGRAMS))))
    chunks = cdiv(count, chunk)
    each, counts = cdiv(blocks, chunks), None
    shape = {"E": experts, "EP": width, "CHUNK": chunk}
    shape |= {"num_warps": 4 if few and count * width <= FEW else 8, "launch_pdl": overlaps(device)}
    if not few:
        counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
        step = min(chunk, max(MOST_PART // 2, FEW // width))
        kernel = variant(_count, **shape, STEP=step, PART=min(step, MOST_PART))
        kernel.launch((chunks,), chosen, counts, count)
    kernel = variant(
        _place, **shape, STEP=max(8, 4096 // width), CHUNKS=next_power_of_2(chunks) if few else 0, BM=block,
        EACH=min(next_power_of_2(each), 8192 // width), RANKED=min(chunk, max(16, 4096 // chunk)),
    )  # fmt: skip
    kernel.launch((chunks,), chosen, counts, places, owners, count, blocks, each)
    return Places(places, owners, block, count)
