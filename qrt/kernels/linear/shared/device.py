"""The order of blocks, and sums over splits of K: what Triton kernels of several products share."""

import triton
import triton.language as tl

from qrt.kernels.sizes import cdiv


@triton.jit
def in_panels(block, token_blocks, row_blocks, PANEL: tl.constexpr):
    """Return (token block, row block) of number `block`.

    PANEL token blocks take a row block before they take the next one, so that their tokens stay in the L2
    cache while all weights pass.
    """
    size = PANEL * row_blocks
    panel = block // size
    width = tl.minimum(token_blocks - panel * PANEL, PANEL)
    place = block % size
    return panel * PANEL + place % width, place // width


@triton.jit
def places_of(ORDER, EXPERTS, block, count, BM: tl.constexpr):
    """Return the expert of a block of `Places`, or -1; of its rows assignments, places, and which are live.

    Without ORDER the first row alone is live.
    """
    m = tl.arange(0, BM)
    expert = tl.load(EXPERTS + block)
    if ORDER is None:
        return expert, block + m, (block + m).to(tl.int64), m == 0
    else:
        place = block * BM + m
        assignment = tl.load(ORDER + place)
        return expert, assignment, place.to(tl.int64), assignment < count


@triton.jit
def rows_of(assignment, place, count, READS: tl.constexpr, SHARES: tl.constexpr):
    """Return the rows of x and of y by `Grouped`, int64."""
    source = place
    if READS > 0:
        source = (assignment // READS).to(tl.int64)
    target = place
    if SHARES > 0:
        target = (assignment % SHARES).to(tl.int64) * (count // SHARES) + assignment // SHARES
    return source, target


@triton.jit
def sum_splits(acc, parts, arrivals, at, inside, size, split, SPLITS: tl.constexpr):
    """Add the partial sums of a block; return the sum, and whether this program holds it.

    acc is the sum of this split. The last program to arrive adds them in a fixed order. parts
    [SPLITS, size] takes them; `at` is where the block lies in one, `inside` which of it is real. arrivals
    points at the counter of the block, 0 before and after.
    """
    tl.store(parts + split * size + at, acc, mask=inside)
    tl.debug_barrier()  # every thread's share is stored before this program counts as arrived
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        acc = tl.zeros(acc.shape, acc.dtype)
        for s in tl.static_range(SPLITS):
            acc += tl.load(parts + s * size + at, mask=inside, other=0, cache_modifier=".cg")
        tl.store(arrivals, 0)
    return acc, last


def split_evenly(steps: int, splits: int, blocks: int, counters: int) -> tuple[int, int]:
    """Return the steps over K of a split, and how many splits there are.

    There are at most `splits`, and only one where some block has no counter.
    """
    share = cdiv(steps, splits if blocks <= counters else 1)
    return share, cdiv(steps, share)
