"""The tiled weight-only product on Hopper for some dozens to some hundreds of tokens, in Gluon.

There the tensor cores are the bound, and Triton waits for every wgmma whose operand is in registers. Here the
weights of plane p+1 are unpacked while plane p multiplies: Y.T = W @ X.T with W as the register operand, X
and the packed tiles brought by the bulk copy engine (TMA). A warp for each asks as long as there is room, and
for tiles before the previous kernel is done (programmatic dependent launch). What multiplies is one group of
warps, or several that do not wait for each other: with row blocks of their own they share the tokens, with
one row block they take its tiles in turn. The scale goes into the weight, rounded to the dtype of the product
as a dequantized weight is, and one accumulator takes all of K; where it is split, the last program of an
output block to arrive adds the partial sums in order.
Layout: quant/weight/tiles.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.gpu import is_hopper, multiprocessors
from qrt.kernels.linear.device import (
    DTYPES,
    both_are_here,
    of_planes,
    of_tiles,
    scale_of_run,
    signals,
    store_block,
    sum_splits,
)
from qrt.kernels.linear.tile_plans import WidePlan, registers
from qrt.kernels.silu_mul.kernel import silu_times
from qrt.quant.weight.device import unit_of
from qrt.quant.weight.tiles import TiledWeight


@triton.jit
def _times(plane, scale, DTYPE: tl.constexpr):
    """plane * scale in the 16-bit DTYPE, two at a time."""
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;", "=r,r,r", [plane, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [plane, scale], dtype=tl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _weights_of(
    words, scales, zeros, PLANE: gl.constexpr, PLANES: gl.constexpr, RUNS: gl.constexpr,
    SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, UNPACK: gl.constexpr, DOT: gl.constexpr,
):  # fmt: skip
    """A plane of `words` [ROWS, J] as weights in DOT, rounded once; times `unit_of` they are weights."""
    RUN: gl.constexpr = PLANE * RUNS // PLANES
    if SCALE == gl.bfloat16 and DOT == gl.bfloat16 and not ASYMMETRIC:
        pair = (scales[RUN // 2] >> (RUN % 2 * 16)) & 0xFFFF
        return UNPACK(words, 0, PLANE, DOT, True, gl.expand_dims(pair * 0x10001, 1))
    if ASYMMETRIC:
        plane = UNPACK(words, gl.expand_dims((zeros << (24 - 8 * RUN)) >> 24, 1), PLANE, DOT, True)
    else:
        plane = UNPACK(words, 0, PLANE, DOT, True)
    scale = gl.expand_dims(scale_of_run(scales, RUN, SCALE), 1)
    if SCALE == DOT:
        return _times(plane, scale, DOT)
    else:
        return (plane.to(gl.float32) * scale.to(gl.float32)).to(DOT)


@gluon.jit
def _fetch_tile(
    w_desc, scale_desc, zero_desc, w_smem, scale_smem, zero_smem, arrived, slot, row, tile,
    WORDS: gl.constexpr, ASYMMETRIC: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile of some rows, from `row` on of each half, into a slot."""
    block, inside = row // 64, row % 64
    FACTS: gl.constexpr = WORDS + ASYMMETRIC  # of a row: its scales, its zeros
    mbarrier.expect(arrived, w_desc.block_type.nbytes + FACTS * scale_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(w_desc, [0, block, tile * 64 + inside, 0], arrived, w_smem.index(slot))
    for w in gl.static_range(WORDS):
        place = (tile * WORDS + w) * 64 + inside
        tma.async_copy_global_to_shared(
            scale_desc, [0, block, place], arrived, scale_smem.index(slot * WORDS + w)
        )
    if ASYMMETRIC:
        place = tile * 64 + inside
        tma.async_copy_global_to_shared(zero_desc, [0, block, place], arrived, zero_smem.index(slot))


@gluon.constexpr_function
def _by_eights(OPERAND, J):
    """The layout of words [2, ROWS / 16, 8, J] that are the operand's [ROWS, J], eight rows of each half by
    turns: a thread then has both halves of a column."""
    warps = OPERAND.parent.warps_per_cta[0]
    words = [[0, 0, 0, 8 << i] for i in range((J // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [1, 0, 0, 0], *words],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[0, 1 << i, 0, 0] for i in range(warps.bit_length() - 1)], [], [2, warps, 8, J],
    )  # fmt: skip


@gluon.jit
def _tile_of(
    w_smem, scale_smem, zero_smem, slot, WORDS: gl.constexpr, ASYMMETRIC: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """What `_fetch_tile` has brought: words [ROWS, J], scales (WORDS of int32 [ROWS]), zeros [ROWS]; without
    zeros the first of the scales stands there."""
    HALVES: gl.constexpr = w_smem.shape[1]
    ROWS: gl.constexpr = HALVES * w_smem.shape[2] * w_smem.shape[3]
    J: gl.constexpr = w_smem.shape[4]
    if HALVES == 2:
        PAIRED: gl.constexpr = _by_eights(OPERAND, J)
        pairs = w_smem.index(slot).reshape([2, ROWS // 16, 8, J]).load(PAIRED)
        words = gl.convert_layout(pairs.permute((1, 0, 2, 3)).reshape([ROWS, J]), OPERAND)
    else:
        words = w_smem.index(slot).reshape([ROWS, J]).load(OPERAND)
    scales = ()
    for w in gl.static_range(WORDS):
        scales = scales + (_row_words(scale_smem.index(slot * WORDS + w), J, OPERAND),)
    zeros = scales[0]
    if ASYMMETRIC:
        zeros = _row_words(zero_smem.index(slot), J, OPERAND)
    return words, scales, zeros


@gluon.jit
def _row_words(smem, J: gl.constexpr, OPERAND: gl.constexpr):
    """An int32 of each of the operand's rows, from smem [halves, .., rows]."""
    ROWS: gl.constexpr = smem.shape[0] * smem.shape[1] * smem.shape[2]
    ROW: gl.constexpr = gl.SliceLayout(1, OPERAND)
    if smem.shape[0] == 2:
        PAIRED: gl.constexpr = gl.SliceLayout(3, _by_eights(OPERAND, J))
        pairs = smem.reshape([2, ROWS // 16, 8]).load(PAIRED)
        return gl.convert_layout(pairs.permute((1, 0, 2)).reshape([ROWS]), ROW)
    else:
        return smem.reshape([ROWS]).load(ROW)


@gluon.jit(do_not_specialize=["M", "share"])
def _wide(
    x_desc, w_desc, scale_desc, zero_desc, BIAS, Y, PARTS, ARRIVALS, M, N, blocks, tiles, share,
    J: gl.constexpr, PLANES: gl.constexpr, RUNS: gl.constexpr, SCALE: gl.constexpr,
    ASYMMETRIC: gl.constexpr, UNPACK: gl.constexpr, DOT: gl.constexpr, BIASED: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, SPLIT: gl.constexpr,
    HALVES: gl.constexpr, XP: gl.constexpr, XS: gl.constexpr, WS: gl.constexpr, PERSISTENT: gl.constexpr,
    WARPS: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (token blocks * cdiv(row blocks, GROUPS * BN), splits): GROUPS of 4 * BN warps that each multiply
    BN row blocks by BM tokens, `share` tiles of K. With two HALVES a group has as many rows of the gate as of
    the up of the same columns, and silu(gate) * up [M, N / 2] goes to Y. If TURNS, two groups have one row
    block and every other tile. If PERSISTENT fewer programs, without splits, take these `blocks` in turn.

    A stage of x, which is for all groups unless they take turns, is XP planes of one tile, a stage of w one
    tile of a group's rows with its scales and zeros; XS (of each group) and WS of them are in flight.
    """
    WORDS: gl.constexpr = RUNS if SCALE == gl.float32 else (RUNS + 1) // 2
    gdc_launch_dependents()
    first = gl.program_id(1) * share
    steps = gl.minimum(share, tiles - first)

    TILES: gl.constexpr = WS * GROUPS
    OWN: gl.constexpr = GROUPS if TURNS else 1  # groups with tokens of their own
    x_smem = gl.allocate_shared_memory(DOT, [XS * OWN, XP, BM, J], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.int16, [TILES] + w_desc.block_type.shape, w_desc.layout)
    ROWS: gl.constexpr = scale_desc.block_type.shape
    scale_smem = gl.allocate_shared_memory(gl.int32, [TILES * WORDS] + ROWS, scale_desc.layout)
    zero_smem = gl.allocate_shared_memory(gl.int32, [TILES if ASYMMETRIC else 1] + ROWS, scale_desc.layout)
    met = x_smem
    gl.static_assert(not (SPLIT or TURNS) or HALVES == 1 and not PERSISTENT)
    if TURNS:  # the second group's sums
        gl.static_assert(GROUPS == 2 and BN == 1)
        SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, min(8, BM // 4), [1, 0])
        met = gl.allocate_shared_memory(gl.float32, [64, BM], SUMS)
    x_ready, x_empty = signals(XS * OWN, GROUPS // OWN)
    w_ready, w_empty = signals(TILES)
    fence_async_shared()
    ring = x_smem, w_smem, scale_smem, zero_smem, x_ready, x_empty, w_ready, w_empty
    output = BIAS, Y, PARTS, ARRIVALS, met, M, N
    copies = x_desc, w_desc, scale_desc, zero_desc, M, first
    gl.warp_specialize(
        [
            (_part, (
                part, ring, output, copies, blocks, steps, J, PLANES, RUNS, SCALE, ASYMMETRIC, UNPACK, DOT,
                BIASED, BM, BN, GROUPS, TURNS, SPLIT, HALVES, XP, XS, WS, WORDS, PERSISTENT,
            ))
            for part in ((0, 1, 2) if GROUPS == 1 else (0, 1, 2, 3) if GROUPS == 2 else (0, 1, 2, 3, 4, 5))
        ],
        WARPS, REGISTERS,
    )  # fmt: skip


@gluon.jit
def _part(
    PART: gl.constexpr, ring, output, copies, blocks, steps, J: gl.constexpr, PLANES: gl.constexpr,
    RUNS: gl.constexpr, SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, UNPACK: gl.constexpr,
    DOT: gl.constexpr, BIASED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, SPLIT: gl.constexpr, HALVES: gl.constexpr, XP: gl.constexpr, XS: gl.constexpr,
    WS: gl.constexpr, WORDS: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """What some warps do: those of a group multiply, one asks for x and one for weights."""
    if PART <= GROUPS:
        gdc_wait()  # asleep: a wait for the first tile would keep asking while the kernel before works
    if PERSISTENT:
        done = 0
        for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
            _part_of_block(
                PART, ring, output, copies, block, done, steps, J, PLANES, RUNS, SCALE, ASYMMETRIC, UNPACK,
                DOT, BIASED, BM, BN, GROUPS, TURNS, SPLIT, HALVES, XP, XS, WS, WORDS, True,
            )  # fmt: skip
            done += steps
    else:
        _part_of_block(
            PART, ring, output, copies, gl.program_id(0), 0, steps, J, PLANES, RUNS, SCALE, ASYMMETRIC,
            UNPACK, DOT, BIASED, BM, BN, GROUPS, TURNS, SPLIT, HALVES, XP, XS, WS, WORDS, False,
        )  # fmt: skip


@gluon.jit
def _part_of_block(
    PART: gl.constexpr, ring, output, copies, block, done, steps, J: gl.constexpr, PLANES: gl.constexpr,
    RUNS: gl.constexpr, SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, UNPACK: gl.constexpr,
    DOT: gl.constexpr, BIASED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, SPLIT: gl.constexpr, HALVES: gl.constexpr, XP: gl.constexpr, XS: gl.constexpr,
    WS: gl.constexpr, WORDS: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """What they do for a block, after `done` tiles of others."""
    if PART < GROUPS:
        _multiply(
            PART, ring, output, block, done, steps, J, PLANES, RUNS, SCALE, ASYMMETRIC, UNPACK, DOT, BIASED,
            BM, BN, GROUPS, TURNS, SPLIT, HALVES, XP, XS, WS, WORDS, PERSISTENT,
        )  # fmt: skip
    elif PART == GROUPS:
        _fetch_x(ring, copies, block, done, steps, PLANES, BM, GROUPS if TURNS else 1, XP, XS)
    else:
        _fetch_w(ring, copies, block, done, steps, BM, BN, GROUPS, TURNS, HALVES, WS, WORDS, ASYMMETRIC)


@gluon.jit
def _first_row(
    block, M, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A group's first row of a block, or of each of its halves."""
    return (block // gl.cdiv(M, BM) * (1 if TURNS else GROUPS) + (0 if TURNS else GROUP)) * (
        BN * 64 // HALVES
    )


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, ring, output, block, done, steps, J: gl.constexpr, PLANES: gl.constexpr,
    RUNS: gl.constexpr, SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, UNPACK: gl.constexpr,
    DOT: gl.constexpr, BIASED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, SPLIT: gl.constexpr, HALVES: gl.constexpr, XP: gl.constexpr, XS: gl.constexpr,
    WS: gl.constexpr, WORDS: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Multiply a group's tiles as they come; write the sum, if it is the whole one or the last part of it.

    A plane multiplies while the next one is unpacked; of several groups, others work while one waits. ptxas
    would wait for every wgmma if several left one from one turn to the next, or if `before` began as zeros.
    """
    x_smem, w_smem, scale_smem, zero_smem, x_ready, x_empty, w_ready, w_empty = ring
    BIAS, Y, PARTS, ARRIVALS, met, M, N = output
    ROWS: gl.constexpr = BN * 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * BN, 1], [16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    acc = gl.zeros([ROWS, BM], gl.float32, MMA)
    if TURNS:
        steps = (steps + (GROUPS - 1 - GROUP)) // GROUPS  # a share of one tile leaves none
    place = done % WS * GROUPS + GROUP
    mbarrier.wait(w_ready.index(place), done // WS & 1, pred=steps > 0)
    words, scales, zeros = _tile_of(w_smem, scale_smem, zero_smem, place, WORDS, ASYMMETRIC, OPERAND)
    before = _weights_of(words, scales, zeros, 0, PLANES, RUNS, SCALE, ASYMMETRIC, UNPACK, DOT)
    for i in range(steps):
        turn = done + i
        place = turn % WS * GROUPS + GROUP
        mbarrier.wait(w_ready.index(place), turn // WS & 1)
        words, scales, zeros = _tile_of(w_smem, scale_smem, zero_smem, place, WORDS, ASYMMETRIC, OPERAND)
        for p in gl.static_range(PLANES):
            weights = _weights_of(words, scales, zeros, p, PLANES, RUNS, SCALE, ASYMMETRIC, UNPACK, DOT)
            stage = turn * (PLANES // XP) + p // XP
            slot, freed = stage % XS, (stage + XS - 1) % XS
            if TURNS:
                slot, freed = slot * GROUPS + GROUP, freed * GROUPS + GROUP
            if GROUPS > 1 and p > 0:
                acc, before = warpgroup_mma_wait(0, deps=[acc, before])
                if p % XP == 0:
                    mbarrier.arrive(x_empty.index(freed), count=1)
            if p % XP == 0:
                mbarrier.wait(x_ready.index(slot), stage // XS & 1)
            x = x_smem.index(slot).reshape([XP * BM, J]).slice(p % XP * BM, BM).permute((1, 0))
            acc = warpgroup_mma(weights, x, acc, is_async=True)
            if p == 0:
                mbarrier.arrive(w_empty.index(place), count=1)
            if GROUPS == 1:
                acc, before = warpgroup_mma_wait(1, deps=[acc, before])  # the plane before this one is done
                if p % XP == 0:
                    mbarrier.arrive(x_empty.index(freed), count=1, pred=(i > 0) | (p > 0))
            before = weights
        if GROUPS > 1:
            acc, before = warpgroup_mma_wait(0, deps=[acc, before])
            mbarrier.arrive(x_empty.index(slot), count=1)
    if GROUPS == 1:
        acc, before = warpgroup_mma_wait(0, deps=[acc, before])
        if PERSISTENT:
            mbarrier.arrive(x_empty.index(((done + steps) * (PLANES // XP) - 1) % XS), count=1)
    acc *= unit_of(DOT, True)

    if TURNS and GROUP == 1:
        met.store(acc)
        both_are_here()
    else:
        last = True
        if TURNS:
            both_are_here()
            acc += met.load(MMA)
        if SPLIT:
            output_block = block if TURNS else block * GROUPS + GROUP
            acc, last = sum_splits(acc, PARTS, ARRIVALS, output_block, MMA)
        if last:
            first = _first_row(block, M, BM, BN, GROUP, GROUPS, TURNS, HALVES)
            token = block % gl.cdiv(M, BM) * BM
            if BIASED:
                row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
                n, half = first + row, 0
                if HALVES == 2:
                    n, half = first + row // 16 * 8 + row % 8, row // 8 % 2
                bias = gl.load(BIAS + n + half * (N // HALVES), mask=n < N // HALVES, other=0.0)
                acc += gl.expand_dims(bias.to(gl.float32), 1)
            y = acc.to(DOT)
            if HALVES == 2:
                gate, up = gl.split(y.reshape([ROWS // 16, 2, 8, BM]).permute((0, 2, 3, 1)))
                y = silu_times(gate, up, True).reshape([ROWS // 2, BM])
            store_block(Y, y, first, token, M, N // HALVES, 4 * BN)


@gluon.jit
def _fetch_x(
    ring, copies, block, done, steps, PLANES: gl.constexpr, BM: gl.constexpr, OWN: gl.constexpr,
    XP: gl.constexpr, XS: gl.constexpr,
):  # fmt: skip
    """Ask for the planes of the tokens, XP at a time, as long as there is room; for OWN groups in turn."""
    desc, M, plane = copies[0], copies[4], copies[5] * PLANES
    smem, ready, empty = ring[0], ring[4], ring[5]
    STAGES: gl.constexpr = PLANES // XP  # of a tile
    token = block % gl.cdiv(M, BM) * BM
    for i in range(steps * STAGES):
        stage = i // (STAGES * OWN) * STAGES + i % STAGES if OWN > 1 else done * STAGES + i
        slot = stage % XS * OWN + (i // STAGES % OWN if OWN > 1 else 0)
        mbarrier.wait(empty.index(slot), (stage // XS - 1) & 1, pred=stage >= XS)
        mbarrier.expect(ready.index(slot), desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [plane + i * XP, token, 0], ready.index(slot), smem.index(slot))


@gluon.jit
def _fetch_w(
    ring, copies, block, done, steps, BM: gl.constexpr, BN: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, HALVES: gl.constexpr, WS: gl.constexpr, WORDS: gl.constexpr,
    ASYMMETRIC: gl.constexpr,
):  # fmt: skip
    """Ask for the groups' tiles, their scales and zeros, likewise."""
    _, w_desc, scale_desc, zero_desc, M, first = copies
    _, w_smem, scale_smem, zero_smem, _, _, ready, empty = ring
    for i in range(steps):
        for g in gl.static_range(1 if TURNS else GROUPS):
            turn = done + i
            slot = turn % WS * GROUPS + g
            if TURNS:
                turn = i // GROUPS
                slot = turn % WS * GROUPS + i % GROUPS
            mbarrier.wait(empty.index(slot), (turn // WS - 1) & 1, pred=turn >= WS)
            row = _first_row(block, M, BM, BN, g, GROUPS, TURNS, HALVES)
            _fetch_tile(
                w_desc, scale_desc, zero_desc, w_smem, scale_smem, zero_smem, ready.index(slot), slot, row,
                first + i, WORDS, ASYMMETRIC,
            )  # fmt: skip


def fits(x: Tensor, weight: TiledWeight) -> bool:
    """Whether `wide_gemm` multiplies x: 16-bit, K in whole planes, on a GPU with wgmma."""
    return is_hopper(x.device) and x.itemsize == 2 and x.shape[1] % weight.packed.shape[3] == 0


def wide_gemm(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, y: Tensor, layout: dict[str, Any], plan: WidePlan,
    gated: bool = False,
) -> None:  # fmt: skip
    """y [T, N] = x [T, K] @ W.T + bias; x contiguous and one that `fits`. If gated, y [T, N / 2] is
    silu(gate) * up of it, for a plan that `gates` and halves of whole row blocks."""
    blocks, tiles, rows, words = weight.packed.shape
    outputs = triton.cdiv(x.shape[0], plan.tokens) * triton.cdiv(blocks, plan.blocks)
    share = triton.cdiv(tiles, plan.splits)
    splits = triton.cdiv(tiles, share)
    part = outputs * splits * plan.tokens * plan.blocks * rows if splits > 1 else 0
    each, halves = plan.group_blocks, 2 if gated else 1
    of_all, of_group = registers(plan)
    persistent = plan.persistent > 0 and splits == 1
    room = plan.persistent * multiprocessors(x.device) if persistent else outputs
    _wide[(min(room, outputs), splits)](
        of_planes(x, plan.x_planes, plan.tokens, words), *of_tiles(weight, each, halves), bias,
        y, torch.empty(part, device=x.device), weight.arrivals, x.shape[0], weight.out_features, outputs,
        tiles, share, J=words, PLANES=layout["PLANES"], RUNS=layout["RUNS"], SCALE=layout["SCALE"],
        ASYMMETRIC=layout["ASYMMETRIC"], UNPACK=layout["UNPACK"], DOT=DTYPES[x.dtype],
        BIASED=bias is not None, BM=plan.tokens, BN=each, GROUPS=plan.groups, TURNS=plan.turns,
        SPLIT=splits > 1, HALVES=halves, XP=plan.x_planes, XS=plan.x_stages, WS=plan.w_stages,
        PERSISTENT=persistent,
        WARPS=(4 * each,) * (plan.groups - 1) + (1, 1), REGISTERS=(of_group,) * (plan.groups - 1) + (24, 24),
        num_warps=4 * each, maxnreg=of_all, launch_pdl=True,
    )  # fmt: skip
