"""Multiply by weights in tiles on Hopper, in Gluon: the warps of a program, and what each does.

The weights of plane p+1 are unpacked while plane p multiplies. The bulk copy engine (TMA) brings X and the
packed tiles: one warp asks for each of them as long as there is room, and for tiles before the previous
kernel is done (programmatic dependent launch). See `wide_kernel`, which launches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.linear.device import blocks_in_use, both_are_here, signals, sum_splits
from qrt.kernels.linear.shared.device import in_panels
from qrt.kernels.linear.tiles.wide_store_kernel import store_sums
from qrt.kernels.linear.tiles.wide_tile_kernel import fetch_w, fetch_x, first_row, tile_of, weights_of
from qrt.quant.weight.device import unit_of


@dataclass(frozen=True)
class WideSizes:
    """The constants of a variant of the kernel, beside `unpack` of the scheme; see `TileConstants`."""

    J: int
    PLANES: int
    RUNS: int
    SCALE: Any
    ASYMMETRIC: bool
    DOT: Any  # dtype of the product
    BIASED: bool
    BM: int
    BN: int
    GROUPS: int
    TURNS: bool
    SPLIT: bool
    HALVES: int
    ACT: str | None  # where there are two halves
    XP: int
    XS: int
    WS: int
    PERSISTENT: bool
    PANEL: int
    SHARES: int

    @property
    def COLUMNS(self) -> int:
        """Return the products that share a plane of weights: Triton's int8 product has at most 128 tokens."""
        return 2 if self.DOT == gl.int8 and self.BM > 128 else 1

    @property
    def SUM(self) -> Any:
        """Return the dtype of sums."""
        return gl.int32 if self.DOT == gl.int8 else gl.float32

    @property
    def WORDS(self) -> int:
        """Return the words that hold the scales of a tile's row."""
        return self.RUNS if self.SCALE == gl.float32 else (self.RUNS + 1) // 2

    @property
    def OWN(self) -> int:
        """Return how many groups have tokens of their own."""
        return self.GROUPS if self.TURNS else 1

    @property
    def ROWS(self) -> int:
        """Return the rows of a group."""
        return self.BN * 64


@gluon.jit(do_not_specialize=["M", "share", "count"])
def wide(
    x_desc, w_desc, scale_desc, zero_desc, BIAS, Y, PARTS, ARRIVALS, M, N, blocks, tiles, share,
    EXPERTS, ORDER, WEIGHTS, count, TOKEN_SCALES, CHANNEL,
    S: gl.constexpr, UNPACK: gl.constexpr, WARPS: gl.constexpr, REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply over a grid (token blocks * cdiv(row blocks, GROUPS * BN), splits).

    Each of GROUPS of 4 * BN warps multiplies BN row blocks by BM tokens, `share` tiles of K. With two HALVES
    a group has as many rows of the gate as of the up of the same columns, and ACT(gate) * up [M, N / 2] goes
    to Y. If TURNS, two groups have one row block, and every other tile each. If PERSISTENT, fewer programs,
    without splits, take these `blocks` in turn.

    With EXPERTS the weight is a stack, of which each block of tokens has one, or none (-1) behind all others.
    With ORDER the tokens are places of `count` assignments: Y is [SHARES, T, N], WEIGHTS times the product.

    Sums of codes are multiplied by TOKEN_SCALES [M] and CHANNEL [N]. Where those of a split of K stay apart,
    PARTS is None and Y is [splits, M, N].

    A stage of x is XP planes of one tile; it is for all groups unless they take turns. A stage of w is one
    tile of a group's rows with its scales and zeros. XS stages of x (of each group) and WS of w are in
    flight.
    """
    gdc_launch_dependents()
    first = gl.program_id(1) * share
    steps = gl.minimum(share, tiles - first)

    TILES: gl.constexpr = S.WS * S.GROUPS
    x_smem = gl.allocate_shared_memory(S.DOT, [S.XS * S.OWN, S.XP, S.BM, S.J], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.int16, [TILES] + w_desc.block_type.shape, w_desc.layout)
    FACTS: gl.constexpr = scale_desc.block_type.shape
    scale_smem = gl.allocate_shared_memory(gl.int32, [TILES * S.WORDS] + FACTS, scale_desc.layout)
    zero_smem = gl.allocate_shared_memory(gl.int32, [TILES if S.ASYMMETRIC else 1] + FACTS, scale_desc.layout)
    met = x_smem
    gl.static_assert(not (S.SPLIT or S.TURNS) or S.HALVES == 1 and not S.PERSISTENT)
    gl.static_assert(not (S.SPLIT or S.TURNS) or S.COLUMNS == 1)
    if S.TURNS:  # the second group's sums
        gl.static_assert(S.GROUPS == 2 and S.BN == 1)
        SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, min(8, S.BM // 4), [1, 0])
        met = gl.allocate_shared_memory(S.SUM, [64, S.BM], SUMS)
    x_ready, x_empty = signals(S.XS * S.OWN, S.GROUPS // S.OWN)
    w_ready, w_empty = signals(TILES)
    fence_async_shared()
    ring = x_smem, w_smem, scale_smem, zero_smem, x_ready, x_empty, w_ready, w_empty
    if EXPERTS is not None:
        gl.static_assert(S.PERSISTENT)
        gdc_wait()
        token_blocks = gl.cdiv(M, S.BM)
        used = blocks_in_use(EXPERTS, token_blocks, num_warps)
        M, blocks = used * S.BM, blocks // token_blocks * used
    output = BIAS, Y, PARTS, ARRIVALS, met, M, N, EXPERTS, (ORDER, WEIGHTS, count), (TOKEN_SCALES, CHANNEL)
    copies = x_desc, w_desc, scale_desc, zero_desc, first
    gl.warp_specialize(
        [
            (_part, (part, ring, output, copies, blocks, steps, S, UNPACK))
            for part in (
                (0, 1, 2) if S.GROUPS == 1 else (0, 1, 2, 3) if S.GROUPS == 2 else (0, 1, 2, 3, 4, 5)
            )
        ],
        WARPS, REGISTERS,
    )  # fmt: skip


@gluon.jit
def _part(
    PART: gl.constexpr, ring, output, copies, blocks, steps, S: gl.constexpr, UNPACK: gl.constexpr
):  # fmt: skip
    """Do the part of some of the warps."""
    if PART <= S.GROUPS and output[7] is None:
        gdc_wait()  # sleeps; waiting for the first tile would poll while the previous kernel works
    if S.PERSISTENT:
        done = 0
        for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
            _part_of_block(PART, ring, output, copies, block, blocks, done, steps, S, UNPACK)
            done += steps
    else:
        _part_of_block(PART, ring, output, copies, gl.program_id(0), blocks, 0, steps, S, UNPACK)


@gluon.jit
def _part_of_block(
    PART: gl.constexpr, ring, output, copies, block, blocks, done, steps, S: gl.constexpr,
    UNPACK: gl.constexpr,
):  # fmt: skip
    """Multiply as a warp of a group, or ask for x or for weights, after `done` tiles of other blocks."""
    M, EXPERTS = output[5], output[7]
    token_blocks = gl.cdiv(M, S.BM)
    if S.PERSISTENT:
        token, row = in_panels(block, token_blocks, blocks // token_blocks, S.PANEL)
    else:
        token, row = block % token_blocks, block // token_blocks
    expert = 0
    if EXPERTS is not None:
        expert = gl.load(EXPERTS + token)
    if PART < S.GROUPS:
        _multiply(PART, ring, output, (block, expert, token, row), done, steps, S, UNPACK)
    elif PART == S.GROUPS:
        fetch_x(ring, copies, token, done, steps, S)
    else:
        fetch_w(ring, copies, expert, row, done, steps, S)


@gluon.jit
def _multiply(  # noqa: C901 -- its branches are constants
    GROUP: gl.constexpr, ring, output, where, done, steps, S: gl.constexpr, UNPACK: gl.constexpr
):  # fmt: skip
    """Multiply a group's tiles as they come; write the sum, if it is the whole one or the last part of it.

    A plane multiplies while the next one is unpacked. Of several groups, others work while one waits. ptxas
    would wait for every wgmma if several groups left one running from one turn to the next, or if `before`
    began as zeros.
    """
    x_smem, _, _, _, x_ready, x_empty, w_ready, w_empty = ring
    BIAS, Y, PARTS, ARRIVALS, met, M, N, _, scatter, of_codes = output
    block, expert, token, row = where
    ROWS: gl.constexpr = S.ROWS
    BM: gl.constexpr = S.BM
    PLANES: gl.constexpr = S.PLANES
    STAGES: gl.constexpr = PLANES // S.XP  # of a tile
    INPUTS: gl.constexpr = 32 if S.DOT == gl.int8 else 16  # of an instruction
    WIDTH: gl.constexpr = BM // S.COLUMNS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * S.BN, 1], [16, WIDTH, INPUTS])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, INPUTS // 8)
    acc = gl.zeros([ROWS, WIDTH], S.SUM, MMA)
    more = gl.zeros([ROWS, WIDTH], S.SUM, MMA)  # of the second half of the tokens, where products have halves
    if S.TURNS:
        steps = (steps + (S.GROUPS - 1 - GROUP)) // S.GROUPS  # a share of one tile leaves none
    place = done % S.WS * S.GROUPS + GROUP
    mbarrier.wait(w_ready.index(place), done // S.WS & 1, pred=steps > 0)
    words, scales, zeros = tile_of(ring, place, S, OPERAND)
    before = weights_of(words, scales, zeros, 0, S, UNPACK)
    for i in range(steps):
        turn = done + i
        place = turn % S.WS * S.GROUPS + GROUP
        mbarrier.wait(w_ready.index(place), turn // S.WS & 1)
        words, scales, zeros = tile_of(ring, place, S, OPERAND)
        for p in gl.static_range(PLANES):
            weights = weights_of(words, scales, zeros, p, S, UNPACK)
            stage = turn * STAGES + p // S.XP
            slot, freed = stage % S.XS, (stage + S.XS - 1) % S.XS
            if S.TURNS:
                slot, freed = slot * S.GROUPS + GROUP, freed * S.GROUPS + GROUP
            if S.GROUPS > 1 and p > 0:
                acc, more, before = _waited(0, acc, more, before, S)
                if p % S.XP == 0:
                    mbarrier.arrive(x_empty.index(freed), count=1)
            if p % S.XP == 0:
                mbarrier.wait(x_ready.index(slot), stage // S.XS & 1)
            x = x_smem.index(slot).reshape([S.XP * BM, S.J])
            acc = warpgroup_mma(weights, _tokens(x, p % S.XP * BM, WIDTH), acc, is_async=True)
            if S.COLUMNS == 2:
                more = warpgroup_mma(weights, _tokens(x, p % S.XP * BM + WIDTH, WIDTH), more, is_async=True)
            if p == 0:
                mbarrier.arrive(w_empty.index(place), count=1)
            if S.GROUPS == 1:
                acc, more, before = _waited(1, acc, more, before, S)  # the plane before this one is done
                if p % S.XP == 0:
                    mbarrier.arrive(x_empty.index(freed), count=1, pred=(i > 0) | (p > 0))
            before = weights
        if S.GROUPS > 1:
            acc, more, before = _waited(0, acc, more, before, S)
            mbarrier.arrive(x_empty.index(slot), count=1)
    if S.GROUPS == 1:
        acc, more, before = _waited(0, acc, more, before, S)
        if S.PERSISTENT:
            mbarrier.arrive(x_empty.index(((done + steps) * STAGES - 1) % S.XS), count=1)
    if S.DOT != gl.int8:
        acc *= unit_of(S.DOT, True)

    if S.TURNS and GROUP == 1:
        met.store(acc)
        both_are_here()
    else:
        last = True
        if S.TURNS:
            both_are_here()
            acc += met.load(MMA)
        if S.SPLIT:
            if PARTS is None:
                Y += gl.program_id(1).to(gl.int64) * M * N
            else:
                output_block = block if S.TURNS else block * S.GROUPS + GROUP
                acc, last = sum_splits(acc, PARTS, ARRIVALS, output_block, MMA)
        if last:
            first = first_row(row, GROUP, S)
            store_sums(acc, Y, BIAS, of_codes, (expert, first, token * BM), M, N, scatter, S)
            if S.COLUMNS == 2:
                store_sums(more, Y, BIAS, of_codes, (expert, first, token * BM + WIDTH), M, N, scatter, S)


@gluon.jit
def _tokens(x, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT tokens of x in shared memory as an operand."""
    return x.slice(FIRST, COUNT).permute((1, 0))


@gluon.jit
def _waited(PLANES: gl.constexpr, acc, more, before, S: gl.constexpr):
    """Wait until products of at most so many planes run; return the sums and what the last one multiplied."""
    if S.COLUMNS == 2:  # Triton takes nothing of 8 bits here, and ptxas knows what a product still reads
        sums = warpgroup_mma_wait(2 * PLANES, deps=[acc, more])
        return sums[0], sums[1], before
    elif S.DOT == gl.int8:
        return warpgroup_mma_wait(PLANES, deps=[acc]), more, before
    else:
        kept = warpgroup_mma_wait(PLANES, deps=[acc, before])
        return kept[0], more, kept[1]
