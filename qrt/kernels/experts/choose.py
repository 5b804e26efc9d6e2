"""Choose how the tokens of experts are ordered, and which kernels multiply them. `plan` alone decides.

Few tokens are bound by reading the weights of the experts that they chose: programs are narrow, so that every
multiprocessor reads. Many tokens are bound by the products: blocks of places are as wide as registers allow.

The rules are those that won on an H200 on 2026-11-27, in bf16: for 1, 16, 64 and 256 to 8,192 tokens of
Qwen3-30B-A3B (w4a16, w4a8), 1 and 16 of gpt-oss-20b (mxfp4), 1 and 32 to 4,096 of Mixtral-8x7B (w4a16,
w4a8). For 64 tokens of Qwen3 the kernel of any GPU took 100 us in blocks of 8 places and 114 in blocks of
16, Hopper's 115 and 125. The plans of blocks of 32 and more in 16 bits are those of dense products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qrt.kernels.linear.int8.plans import BlockPlan
from qrt.kernels.linear.product import Epilogue, Kernel, Product
from qrt.kernels.linear.tiles.plans import (
    INT8_EXPERTS,
    FusedPlan,
    WidePlan,
    even_splits,
    expert_block,
    expert_plan,
)
from qrt.kernels.sizes import cdiv, next_power_of_2
from qrt.quant.weight.base import Layout
from qrt.quant.weight.tiles import TILE_ROWS

SHARE = 8  # tiles of K in a program of few tokens, if that takes no more than so many programs:
PROGRAMS = 1000
FUSED = 16  # most places of a block that the kernel of any GPU multiplies where Hopper's could
SINGLES = 16  # most assignments that are blocks of their own, unless there is one token
_LEAST = {Layout.TILES: 8, Layout.PLAIN: 16, Layout.INT8_ROWS: 16}
_MOST = {
    Layout.TILES: {2: 64, 4: 16}, Layout.PLAIN: {2: 128, 4: 32}, Layout.INT8_ROWS: {2: 128, 4: 128}
}  # fmt: skip  # places of a block, by bytes of x: sums fill the registers


class ExpertSizes(NamedTuple):
    """What a plan depends on.

    layout    of the weights
    dtype     of x
    tokens    T
    top_k     k
    experts   E
    hidden    outputs of down
    inner     I, the inputs of down
    steps     tiles of K in gate_up and in down, for Layout.TILES; else their inputs
    words     words of a tile's row in gate_up and in down
    sms       multiprocessors of the GPU, if Hopper's kernel takes both products; else 0
    int8      whether it takes both with int8 tokens
    """

    layout: Layout
    dtype: torch.dtype
    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    steps: tuple[int, int]
    words: tuple[int, int] = (0, 0)
    sms: int = 0
    int8: bool = False

    @property
    def assignments(self) -> int:
        """Return the number of assignments."""
        return self.tokens * self.top_k


class ExpertsPlan(NamedTuple):
    """How the experts of a layer run.

    block     places of a block
    ordered   whether assignments are put in order by expert; else each is a block of its own
    joined    whether act(gate) * up is part of the first product
    int8      whether both products read tokens as int8 codes
    gate_up   how the first product is launched
    down      how the second one is
    """

    block: int
    ordered: bool
    joined: bool
    int8: bool
    gate_up: FusedPlan | BlockPlan | WidePlan
    down: FusedPlan | BlockPlan | WidePlan


def is_ordered(sizes: ExpertSizes) -> bool:
    """Return whether assignments are ordered: not for one token, nor for few that rarely share an expert."""
    few = sizes.assignments <= SINGLES and 4 * sizes.assignments * sizes.tokens <= sizes.experts
    return sizes.tokens > 1 and not few


def block_of(sizes: ExpertSizes) -> int:
    """Return the places of a block: half more than an expert gets on average, if registers allow it."""
    if not is_ordered(sizes):
        return _LEAST[sizes.layout]
    wanted = next_power_of_2(cdiv(3 * sizes.assignments, 2 * min(sizes.assignments, sizes.experts)))
    return min(max(_LEAST[sizes.layout], wanted), _MOST[sizes.layout][sizes.dtype.itemsize])


def plan(sizes: ExpertSizes) -> ExpertsPlan:
    """Return a plan by rules of thumb; this module says which were measured."""
    ordered, block = is_ordered(sizes), block_of(sizes)
    if sizes.sms and ordered and block > FUSED:
        return _wide(sizes)
    singles = 0 if ordered else sizes.assignments
    if sizes.layout is Layout.TILES:
        joined, (first, second) = sizes.inner % TILE_ROWS == 0, zip(sizes.steps, sizes.words, strict=True)
        size = sizes.dtype.itemsize
        tiled = _tiles(2 * sizes.inner, *first, size, block, singles, joined)
        down = _tiles(sizes.hidden, *second, size, block, singles)
        return ExpertsPlan(block, ordered, joined, False, tiled, down)
    int8 = sizes.layout is Layout.INT8_ROWS
    gate_up = _rows(sizes, 2 * sizes.inner, sizes.steps[0], block, singles, 64)
    rows = _rows(sizes, sizes.hidden, sizes.steps[1], block, singles, 32)
    return ExpertsPlan(block, ordered, True, int8, gate_up, rows)


def explain(sizes: ExpertSizes) -> tuple[str, str]:
    """Return which kernel runs each of the two products, and why, in a sentence or two."""
    how = plan(sizes)
    why = "each token is a block of its own with each of its experts"
    if how.ordered:
        why = f"tokens are in order by expert, in blocks of {how.block}"
    found = []
    kernels: dict[type, Kernel] = {FusedPlan: Kernel.FUSED, WidePlan: Kernel.WIDE, BlockPlan: Kernel.ROWS}
    if how.int8:
        kernels = {WidePlan: Kernel.WIDE_INT8, BlockPlan: Kernel.INT8_BLOCK}
    for one, epilogue in ((how.gate_up, Epilogue.ACT_MUL), (how.down, Epilogue.PLAIN)):
        kernel = kernels[type(one)]
        found.append(Product(kernel, why, one, joined=how.joined, epilogue=epilogue).explain())
    return found[0], found[1]


def _wide(sizes: ExpertSizes) -> ExpertsPlan:
    """Return a plan of Hopper's kernel for both products."""
    block = expert_block(sizes.assignments, sizes.experts, sizes.int8)
    joined, owners = sizes.inner % TILE_ROWS == 0, min(sizes.assignments, sizes.experts)
    if sizes.int8 and block in INT8_EXPERTS:  # less is bound by reading weights
        return ExpertsPlan(block, True, joined, True, *INT8_EXPERTS[block])
    gate_up, down = (
        expert_plan(block, owners, cdiv(n, TILE_ROWS), words, sizes.sms)
        for n, words in zip((2 * sizes.inner, sizes.hidden), sizes.words, strict=True)
    )
    return ExpertsPlan(block, True, joined, False, gate_up, down)


def _splits(programs: int, singles: int, steps: int, n: int) -> int:
    """Return splits of K for assignments that are blocks of their own: splits are short, if not too many.

    Each program needs a counter, of which an expert has n.
    """
    if not singles or singles * programs > n:
        return 1
    splits = next_power_of_2(cdiv(steps, SHARE))
    while splits > 1 and singles * programs * splits > PROGRAMS:
        splits //= 2
    return even_splits(splits, steps)


def _tiles(
    n: int, tiles: int, words: int, itemsize: int, block: int, singles: int, joined: bool = False
) -> FusedPlan:
    """Return a plan for tiles, of which a warp unpacks 4 KB; two warps have one more on its way.

    x of fp32 takes four warps at least: with two, tests of w4a16 failed on an H200.
    """
    rows = cdiv(n, TILE_ROWS)
    blocks = 2 if joined or (not singles and rows % 2 == 0) else 1
    warps = max(2 if itemsize < 4 else 4, blocks * words // 32)
    if block > 16:
        warps = 8 if (block, blocks) == (64, 2) else 4
    splits = _splits(rows // blocks, singles, tiles, n)
    return FusedPlan(blocks, splits, warps, 4 if warps == 2 and splits == 1 else 3)


def _rows(sizes: ExpertSizes, n: int, k: int, block: int, singles: int, outputs: int) -> BlockPlan:
    """Return a plan for rows, of `outputs` for few tokens. Only int8 rows have counters."""
    int8 = sizes.layout is Layout.INT8_ROWS
    itemsize = 1 if int8 else sizes.dtype.itemsize
    if block > 32:
        return BlockPlan(block, 128, 128 // itemsize, 1, 8, 3)
    inputs = 256 // itemsize
    splits = _splits(cdiv(n, outputs), singles, cdiv(k, inputs), n) if int8 else 1
    return BlockPlan(block, outputs, inputs, splits, 4, 4 if itemsize < 4 else 2)
