"""Multiply int4 and int8 weights by a few tokens on Hopper, as an int8 product, in Gluon.

In bf16, unpacking the weights takes the time: 7 instructions for 8 weights of int4, most of them at half
rate, and a wgmma takes as long for 8 columns as for 64. In int8 the bytes of a word, or their halves, are
codes as they lie (`tiles`): 2 instructions for 8 weights. An activation is two int8 digits (`Digits`), which
are two columns of one wgmma. Sums over a group are exact in int32. Scales and zero points of the group follow
in fp32. A tile has as many groups of digits as its words have runs: two of int4, one of int8.

One warp asks for weights (TMA) before the previous kernel is done, and for digits after that. Two groups of 4
warps multiply and do not wait for each other: one scales sums and unpacks while the tensor cores work for the
other. Each has half of the rows of a gated program, or every other tile of K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.act_mul.kernel import act_times
from qrt.kernels.gpu import is_hopper, multiprocessors
from qrt.kernels.launch import variant
from qrt.kernels.linear.device import (
    DTYPES,
    FLAT,
    both_are_here,
    of_tiles,
    of_tokens,
    signals,
    store_block,
    sum_splits,
)
from qrt.kernels.linear.tiles.digits_tile_kernel import codes_of, fetch, high_and_low, scaled
from qrt.kernels.linear.tiles.make_digits_kernel import make_digits
from qrt.kernels.sizes import cdiv
from qrt.quant.device import digits_of, larger
from qrt.quant.digits import GROUP, MOST_TOKENS, Digits, room_for
from qrt.quant.weight.tiles import TILE_ROWS, TiledWeight

_SWIZZLED = gl.NVMMASharedLayout(128, 8, 4)
_BY_COLUMN = gl.SwizzledSharedLayout(1, 1, 1, [0])
_BY_ROW = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.jit(do_not_specialize=["M", "tiles", "share"])
def _digits_product(
    x_desc, fact_desc, w_desc, scale_desc, zero_desc, BIAS, Y, FACTS, PARTS, ARRIVALS, M, N, tiles, share,
    SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, RUNS: gl.constexpr, BM: gl.constexpr,
    BLOCKS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, ACT: gl.constexpr,
    REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply over a grid (row blocks / BLOCKS, S): Y [S, M, N], the sums of `share` tiles of K each.

    A tile has RUNS groups of digits. With PARTS [row blocks, S, 64, BM] the sums are added: Y [M, N]. BIAS
    [N], if any, is added too.

    With two HALVES, half of the blocks are the gate and half the up of the same columns. ACT(gate) * up [M,
    N / 2] goes to Y and FACTS as `Digits`; four blocks make a group of them. A warp group has gate and up of
    half of its columns.
    """
    gl.static_assert(HALVES == 2 or STAGES % 2 == 0)  # so a group waits for every phase of its places
    gdc_launch_dependents()
    EACH: gl.constexpr = BLOCKS // HALVES
    block, first = gl.program_id(0) * EACH, gl.program_id(1) * share
    steps = gl.minimum(share, tiles - first)
    w = gl.allocate_shared_memory(gl.int8, [STAGES * HALVES, HALVES, EACH // HALVES, 64, 128], w_desc.layout)
    SCALES: gl.constexpr = [STAGES * HALVES, HALVES, EACH // HALVES, 64]
    scales = gl.allocate_shared_memory(gl.int32, SCALES, scale_desc.layout)
    zeros = scales
    if ASYMMETRIC:
        zeros = gl.allocate_shared_memory(gl.int32, SCALES, scale_desc.layout)
    x = gl.allocate_shared_memory(gl.int8, [STAGES, RUNS, 2, BM, 128], x_desc.layout)
    facts = gl.allocate_shared_memory(gl.float32, [STAGES, 2, 2, BM], fact_desc.layout)
    if HALVES == 2:
        largest = gl.allocate_shared_memory(gl.float32, [2, BM], _BY_COLUMN)
        met = largest, gl.allocate_shared_memory(gl.int32, [2, BM], _BY_COLUMN)
    else:
        met = gl.allocate_shared_memory(gl.float32, [BLOCKS * 64, BM], _BY_ROW)
    ready, empty = signals(STAGES, HALVES)
    fence_async_shared()
    ring = (w, scales, zeros, x, facts, ready, empty)
    work = (ring, met, BIAS, Y, FACTS, PARTS, ARRIVALS, block, steps, M, N)
    copies = (ring, x_desc, fact_desc, w_desc, scale_desc, zero_desc, block, first, steps)
    gl.warp_specialize(
        [
            (_multiply, (work, 0, SCALE, ASYMMETRIC, RUNS, BM, BLOCKS, HALVES, STAGES, ACT)),
            (_multiply, (work, 1, SCALE, ASYMMETRIC, RUNS, BM, BLOCKS, HALVES, STAGES, ACT)),
            (fetch, (copies, ASYMMETRIC, RUNS, BM, BLOCKS, HALVES, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.jit
def _multiply(
    work, GROUP: gl.constexpr, SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, RUNS: gl.constexpr,
    BM: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Multiply the tiles as they come, and write the sum.

    A warp group has its rows of all tiles, or all rows of every other tile.
    """
    ring, met, BIAS, Y, FACTS, PARTS, ARRIVALS, block, steps, M, N = work
    w, scales, zeros, x, facts, ready, empty = ring
    ROWS: gl.constexpr = BLOCKS * 64 // HALVES
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BM, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    none = gl.zeros([ROWS, 2 * BM], gl.int32, MMA)
    acc = high_and_low(none.to(gl.float32))[0]
    SUMS: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SUMS)
    by_token = facts._reinterpret(gl.float32, [STAGES * 4, BM], _BY_COLUMN)
    gdc_wait()  # sleeps; waiting for the first tile would poll while the previous kernel works
    FIRST: gl.constexpr = 0 if HALVES == 2 else GROUP
    for i in range(FIRST, steps, 3 - HALVES):
        slot = i % STAGES
        part = slot * HALVES + GROUP - FIRST
        mbarrier.wait(ready.index(slot), i // STAGES & 1)
        packed = w.index(part).reshape([ROWS, 128]).load(OPERAND)
        scale = scales.index(part).reshape([ROWS]).load(ROW)
        zero = zeros.index(part).reshape([ROWS]).load(ROW)
        digits = x.index(slot).reshape([RUNS * 2 * BM, 128])
        of_scale, of_sum = slot * 4, slot * 4 + 2
        first = digits.slice(0, 2 * BM).permute((1, 0))
        sums = warpgroup_mma(codes_of(packed, 0, RUNS), first, none, use_acc=False, is_async=True)
        if RUNS == 2:
            second = digits.slice(2 * BM, 2 * BM).permute((1, 0))
            later = warpgroup_mma(codes_of(packed, 1, RUNS), second, none, use_acc=False, is_async=True)
            of_x = by_token.index(of_scale).load(COLUMN), by_token.index(of_sum).load(COLUMN)
            sums = warpgroup_mma_wait(1, deps=[sums])
            acc += scaled(sums, scale, zero, of_x, 0, RUNS, SCALE, ASYMMETRIC)
            sums = later
        LAST: gl.constexpr = RUNS - 1
        of_x = by_token.index(of_scale + LAST).load(COLUMN), by_token.index(of_sum + LAST).load(COLUMN)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(slot), count=1)
        acc += scaled(sums, scale, zero, of_x, LAST, RUNS, SCALE, ASYMMETRIC)

    if HALVES == 2:  # rows r and r + ROWS / 2 are in one thread
        gate, up = gl.split(acc.to(gl.bfloat16).reshape([2, ROWS // 2, BM]).permute((1, 2, 0)))
        active = act_times(gate, up, ACT, True).to(gl.float32)
        _store_digits(active, met, Y, FACTS, block // 2, N // 256, GROUP, BM)
    elif GROUP == 1:
        met.store(acc)
        both_are_here()
    else:
        both_are_here()
        acc += met.load(SUMS)
        last = True
        if PARTS is None:
            Y += gl.program_id(1).to(gl.int64) * M * N
        else:
            acc, last = sum_splits(acc, PARTS, ARRIVALS, gl.program_id(0), SUMS)
        if last:
            if BIAS is not None:
                bias = gl.load(BIAS + block * 64 + gl.arange(0, ROWS, layout=ROW))
                acc += gl.expand_dims(bias.to(gl.float32), 1)
            store_block(Y, acc.to(Y.dtype.element_ty), block * 64, 0, M, N, 4)


@gluon.jit
def _store_digits(x, met, CODES, FACTS, group, groups, HALF: gl.constexpr, BM: gl.constexpr):
    """Store x fp32 [64, BM], half of a group of `Digits`; the other warp group has the other half."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, x.type.layout))
    largest = _meet(met[0], gl.reduce(gl.abs(x), 0, larger), HALF)
    codes, scale = digits_of(x, larger(largest[0], largest[1]), 0)
    total = _meet(met[1], gl.sum(codes, 0), HALF)
    if HALF == 0:
        gl.store(FACTS + group * BM + token, scale)
        gl.store(FACTS + (groups + group) * BM + token, (total[0] + total[1]).to(gl.float32))
    at = (group * 2 * BM + gl.expand_dims(token, 0)) * 128 + gl.expand_dims(row * 2 + HALF, 1)
    gl.store(CODES + at, ((codes + 128) >> 8).to(gl.int8))
    gl.store(CODES + BM * 128 + at, codes.to(gl.int8))


@gluon.jit
def _meet(met, value, HALF: gl.constexpr):
    """Exchange a value [BM] between the two warp groups; return both."""
    met.index(HALF).store(value)
    both_are_here()
    return met.index(0).load(value.type.layout), met.index(1).load(value.type.layout)


class _Plan(NamedTuple):
    """How `_digits_product` is launched.

    Found at Llama-3-8B's sizes on an H200, in layers of 4, 8 and 16 tokens (docs/kernels-journal.md).

    blocks      row blocks of a program
    stages      tiles on their way or waiting; even unless gated, so that a place belongs to one warp group
    registers   registers of a thread, on average with those of the warp that asks
    """

    blocks: int
    stages: int
    registers: int

    @property
    def of_second(self) -> int:
        """Return the registers of a thread of the second group.

        4 warps of 12 are for asking, with 24 registers each. The second group has half of the rest.
        """
        return (3 * self.registers - 24) // 2 // 8 * 8


_PLAIN = {  # by bits and padded tokens; with so many stages an SM takes one program, so qkv covers all SMs
    (4, 8): _Plan(blocks=1, stages=10, registers=80),
    (4, 16): _Plan(blocks=1, stages=8, registers=80),
    (8, 8): _Plan(blocks=1, stages=14, registers=80),
    (8, 16): _Plan(blocks=1, stages=12, registers=80),
}
_SHARES = {  # by bits; an SM takes two programs
    4: _Plan(blocks=1, stages=6, registers=80),
    8: _Plan(blocks=1, stages=8, registers=80),
}
_GATED = _Plan(blocks=4, stages=5, registers=136)
LEAST_SHARE = 16  # groups of inputs of a program


def fits(x: Tensor, weight: TiledWeight, bits: int) -> bool:
    """Return whether `digits_gemm` multiplies x [T, K] and is faster than the kernels of bf16.

    It is for int4 in whole groups, and few tokens, on a Hopper GPU.
    """
    tokens, inputs = x.shape
    few = bits == 4 and 1 <= tokens <= MOST_TOKENS and x.dtype == torch.bfloat16
    whole = few and inputs % GROUP == 0 and weight.out_features % TILE_ROWS == 0
    return whole and weight.has_whole_groups and is_hopper(x.device)


def digits_gemm(x: Tensor, weight: TiledWeight, bias: Tensor | None, bits: int) -> Tensor:
    """Return x [T, K] @ W.T + bias, [T, N]; x `fits`. K is split where the row blocks are few."""
    made, sms = make_digits(x.contiguous(), room_for(x.shape[0])), multiprocessors(x.device)
    blocks, tiles = weight.packed.shape[:2]
    if blocks <= sms < 2 * blocks:
        return digits_product(made, weight, bias, bits, x.dtype)
    share, parts = _share(made, weight) if blocks <= sms else tiles, None
    if (splits := cdiv(tiles, share)) > 1:
        room = (blocks, splits, TILE_ROWS, made.codes.shape[2])
        parts = torch.empty(room, dtype=torch.float32, device=x.device)
    y = x.new_empty(x.shape[0], weight.out_features)
    _launch(made, weight, bits, _SHARES[bits], share, y, bias=bias, parts=parts)
    return y


def digits_product(
    x: Digits, weight: TiledWeight, bias: Tensor | None, bits: int, dtype: torch.dtype
) -> Tensor:
    """Return x [T, K] @ W.T + bias in `dtype`, [T, N]; codes have `bits`."""
    y = torch.empty(x.tokens, weight.out_features, dtype=dtype, device=x.codes.device)
    _launch(x, weight, bits, _PLAIN[bits, x.codes.shape[2]], weight.packed.shape[1], y, bias=bias)
    return y


def digits_partial(x: Digits, weight: TiledWeight, bits: int) -> Tensor:
    """Return the sums of each of S splits of K, fp32 [S, T, N]."""
    share = _share(x, weight)
    splits = cdiv(weight.packed.shape[1], share)
    y = torch.empty(splits, x.tokens, weight.out_features, dtype=torch.float32, device=x.codes.device)
    _launch(x, weight, bits, _SHARES[bits], share, y)
    return y


def _share(x: Digits, weight: TiledWeight) -> int:
    """Return the tiles of K of a program: as many programs as run at once, and none of them short."""
    blocks, tiles = weight.packed.shape[:2]
    most = min(2 * multiprocessors(x.codes.device) // blocks, x.codes.shape[0] // LEAST_SHARE)
    return cdiv(tiles, max(1, most))


def gated_digits_product(x: Digits, weight: TiledWeight, bits: int, act: str) -> Digits:
    """Return act(gate) * up of x @ W.T, [T, N / 2], rounded as in bf16."""
    y = Digits.empty(x.tokens, weight.out_features // 2, x.codes.shape[2], x.codes.device)
    _launch(x, weight, bits, _GATED, weight.packed.shape[1], y.codes, y.facts, act=act)
    return y


def _launch(
    x: Digits, weight: TiledWeight, bits: int, plan: _Plan, share: int, y: Tensor,
    facts: Tensor | None = None, bias: Tensor | None = None, parts: Tensor | None = None,
    act: str | None = None,
) -> None:  # fmt: skip
    """Launch `_digits_product` with `share` tiles of K a program.

    y is [S, T, N], or [T, N] if a share is all of K or `parts` is there to add partial sums up. With `act`
    and `facts` it takes the codes of Digits.
    """
    (blocks, tiles), room, runs = weight.packed.shape[:2], x.codes.shape[2], 8 // bits
    halves = 2 if act else 1
    kernel = variant(
        _digits_product, SCALE=DTYPES[weight.scale.dtype], ASYMMETRIC=weight.zero.numel() > 0, RUNS=runs,
        BM=room, BLOCKS=plan.blocks, HALVES=halves, STAGES=plan.stages, ACT=act, REGISTERS=plan.of_second,
        num_warps=4, maxnreg=plan.registers, launch_pdl=True,
    )  # fmt: skip
    kernel.launch(
        (blocks // plan.blocks, cdiv(tiles, share)),
        of_tokens(x.codes, (runs, 2, room, GROUP), _SWIZZLED), of_tokens(x.facts, (2, 2, room), FLAT),
        *of_tiles(weight, plan.blocks // halves, halves, torch.int8), bias, y, facts, parts,
        weight.arrivals, x.tokens, weight.out_features, tiles, share,
    )  # fmt: skip
