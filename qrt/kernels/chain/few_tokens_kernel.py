"""`chain` of 2 to 16 tokens and int4 weights on Hopper, in Gluon: one persistent kernel over an int8 product.

In bf16 such a product is bound by what unpacks its weights: 7 instructions for 8 of them, most at half rate,
and a wgmma takes as long for 8 columns as for 64. As int8 the low halves of a word's bytes are codes once
they are shifted up, the high ones as they are (`tiles`), 3 instructions for 8 weights; and an activation is
two int8 digits (`Digits`), two columns of one wgmma. Sums over a group are exact in int32; they meet the
group's scales and zero points in fp32.

An SM has a program. One of its warps asks for the weights of all four products in order (TMA), as long as
there is room, one for their digits once every program has written its part of them; the others multiply 256
rows at a time. Where there are fewer blocks of rows than programs, a product is split along K and leaves
shares, which those who need them add. A norm is not divided by before its product is there: so the programs
make parts of rows, and each meets the squares of all parts.
As they wait for each other, all must get an SM in the end: what else runs may be slow, but not wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
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

from qrt.kernels.gpu import multiprocessors
from qrt.kernels.linear.hopper_kernel import DTYPES, of_tokens, of_weight, scale_of_run
from qrt.kernels.silu_mul.kernel import silu_times
from qrt.quant.device import digits_of, larger
from qrt.quant.digits import GROUP, Digits
from qrt.quant.weight.tiles import TILE_ROWS, TiledWeight

ROWS = 256  # of a product that a program multiplies at a time; of gate_up a group's gate, then its up
WARPS = 4  # of each of two groups that multiply
STAGES = 5  # tiles of 256 inputs on their way or waiting, 34 KB each and 8 of digits
REGISTERS = 240  # of a thread that multiplies
MEETINGS = 6
MOST_SHARES = 8
PART = 512  # of a row that a warp group makes the norm of
_TILE = 256  # inputs
_SWIZZLED = gl.NVMMASharedLayout(128, 8, 4)
_FLAT = gl.NVMMASharedLayout(0, 32, 3)
_BY_COLUMN = gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit(do_not_specialize=["M"])
def _few_tokens(
    x, x_facts, normal, normal_facts, active, active_facts, o, o_scale, o_zero, gate_up, gate_up_scale,
    gate_up_zero, down, down_scale, down_zero, qkv, qkv_scale, qkv_zero, RESIDUAL, MLP_NORM, NORM,
    NORMAL, NORMAL_FACTS, SQUARES, ACTIVE, ACTIVE_FACTS, SHARES, OUT, ARRIVALS, M, stride, eps,
    N: gl.constexpr, TILES: gl.constexpr, SHARE: gl.constexpr, PHASES: gl.constexpr, SCALE: gl.constexpr,
    ASYMMETRIC: gl.constexpr, BM: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr,
    MOST_SHARES: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (SMs,). x .. qkv_zero: descriptors. N, TILES, SHARE: of each of PHASES products the outputs, the
    tiles of its inputs and how many of them a program takes at a time."""
    w = gl.allocate_shared_memory(gl.int8, [STAGES * 2, 1, 2, 64, 128], o.layout)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 1, 2, 64], o_scale.layout)
    zeros = scales
    if ASYMMETRIC:
        zeros = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 1, 2, 64], o_scale.layout)
    digits = gl.allocate_shared_memory(gl.int8, [STAGES, 2, 2, BM, 128], x.layout)
    facts = gl.allocate_shared_memory(gl.float32, [STAGES, 2, 2, BM], x_facts.layout)
    largest = gl.allocate_shared_memory(gl.float32, [2, BM], _BY_COLUMN)
    totals = gl.allocate_shared_memory(gl.int32, [2, BM], _BY_COLUMN)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=2)  # weights and digits
        mbarrier.init(empty.index(s), count=2)  # both warp groups
    fence_async_shared()
    ring = (w, scales, zeros, digits, facts, ready, empty)
    work = (
        ring, (largest, totals), RESIDUAL, MLP_NORM, NORM, NORMAL, NORMAL_FACTS, SQUARES, ACTIVE,
        ACTIVE_FACTS, SHARES, OUT, ARRIVALS, M, stride, eps,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_work, (
                work, 0, N, TILES, SHARE, PHASES, SCALE, ASYMMETRIC, BM, PART, MOST_SHARES, STAGES,
            )),
            (_work, (
                work, 1, N, TILES, SHARE, PHASES, SCALE, ASYMMETRIC, BM, PART, MOST_SHARES, STAGES,
            )),
            (_fetch_weights, (
                ring, ((o, o_scale, o_zero), (gate_up, gate_up_scale, gate_up_zero),
                       (down, down_scale, down_zero), (qkv, qkv_scale, qkv_zero)),
                N, TILES, SHARE, PHASES, ASYMMETRIC, ROWS, STAGES,
            )),
            (_fetch_digits, (
                ring, ((x, x_facts), (normal, normal_facts), (active, active_facts), (normal, normal_facts)),
                ARRIVALS, N, TILES, SHARE, PHASES, BM, ROWS, STAGES,
            )),
        ],
        [4, 1, 1], [REGISTERS, 24, 24],
    )  # fmt: skip


@gluon.jit
def _fetch_weights(
    ring, weights, N: gl.constexpr, TILES: gl.constexpr, SHARE: gl.constexpr, PHASES: gl.constexpr,
    ASYMMETRIC: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for this program's tiles of all products, in the order in which they are multiplied."""
    i = 0
    for phase in gl.static_range(PHASES):
        i = _fetch_weight(
            ring, weights[phase], i, N[phase], TILES[phase], SHARE[phase], 2 if phase == 1 else 1, ASYMMETRIC,
            ROWS, STAGES,
        )  # fmt: skip


@gluon.jit
def _fetch_weight(
    ring, weight, i, N: gl.constexpr, TILES: gl.constexpr, SHARE: gl.constexpr, HALVES: gl.constexpr,
    ASYMMETRIC: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    w, scales, zeros, digits, facts, ready, empty = ring
    BLOCKS: gl.constexpr = (N + ROWS - 1) // ROWS
    ITEMS: gl.constexpr = BLOCKS * ((TILES + SHARE - 1) // SHARE)
    EACH: gl.constexpr = 2 // HALVES  # row blocks of a half that a warp group has
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        block, first = item % BLOCKS * (2 * EACH), item // BLOCKS * SHARE
        steps = gl.minimum(SHARE, TILES - first)
        for s in range(steps):
            slot, row = i % STAGES, (first + (s + item) % steps) * 64
            arrived = ready.index(slot)
            mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1, pred=i >= STAGES)
            mbarrier.expect(arrived, ROWS * (128 + 4 + 4 * ASYMMETRIC))
            for half in gl.static_range(2):
                at, part = block + half * EACH, slot * 2 + half
                bytes = w.index(part).reshape([HALVES, EACH, 64, 128])
                tma.async_copy_global_to_shared(weight[0], [0, at, row, 0], arrived, bytes)
                words = scales.index(part).reshape([HALVES, EACH, 64])
                tma.async_copy_global_to_shared(weight[1], [0, at, row], arrived, words)
                if ASYMMETRIC:
                    words = zeros.index(part).reshape([HALVES, EACH, 64])
                    tma.async_copy_global_to_shared(weight[2], [0, at, row], arrived, words)
            i += 1
    return i


@gluon.jit
def _fetch_digits(
    ring, inputs, ARRIVALS, N: gl.constexpr, TILES: gl.constexpr, SHARE: gl.constexpr, PHASES: gl.constexpr,
    BM: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for the digits that meet those tiles, when they are written."""
    gdc_wait()
    i = 0
    for phase in gl.static_range(PHASES):
        i = _fetch_input(
            ring, inputs[phase], i, ARRIVALS, 4 if phase == 3 else phase, N[phase], TILES[phase], SHARE[phase],
            BM, ROWS, STAGES,
        )  # fmt: skip


@gluon.jit
def _fetch_input(
    ring, x, i, ARRIVALS, MEETING: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr, SHARE: gl.constexpr,
    BM: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    w, scales, zeros, digits, facts, ready, empty = ring
    BLOCKS: gl.constexpr = (N + ROWS - 1) // ROWS
    ITEMS: gl.constexpr = BLOCKS * ((TILES + SHARE - 1) // SHARE)
    if MEETING > 0 and gl.program_id(0) < ITEMS:
        _await(ARRIVALS + MEETING, False)
        _fence()
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        first = item // BLOCKS * SHARE
        steps = gl.minimum(SHARE, TILES - first)
        for s in range(steps):
            slot, tile = i % STAGES, first + (s + item) % steps  # not all programs the same at once
            arrived = ready.index(slot)
            mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1, pred=i >= STAGES)
            mbarrier.expect(arrived, 4 * BM * (128 + 4))
            tma.async_copy_global_to_shared(x[0], [tile * 2, 0, 0, 0], arrived, digits.index(slot))
            tma.async_copy_global_to_shared(x[1], [0, tile * 2, 0], arrived, facts.index(slot))
            i += 1
    return i


@gluon.jit
def _work(
    work, HALF: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr, SHARE: gl.constexpr, PHASES: gl.constexpr,
    SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, BM: gl.constexpr, PART: gl.constexpr,
    MOST_SHARES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply half of the rows. One loop for all products: code that is met for the first time is waited
    for."""
    (
        ring, met, RESIDUAL, MLP_NORM, NORM, NORMAL, NORMAL_FACTS, SQUARES, ACTIVE, ACTIVE_FACTS, SHARES, OUT,
        ARRIVALS, M, stride, eps,
    ) = work  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BM, 32])
    none = gl.zeros([128, 2 * BM], gl.int32, MMA)
    SUMS: gl.constexpr = _high_and_low(none)[0].type.layout
    TOKEN: gl.constexpr = gl.SliceLayout(0, SUMS)
    HIDDEN: gl.constexpr = N[0]
    PARTS: gl.constexpr = (HIDDEN + PART - 1) // PART
    token = gl.arange(0, BM, layout=TOKEN)
    gdc_wait()
    i = 0
    for phase in range(PHASES):
        n, tiles, share = _of(N, phase), _of(TILES, phase), _of(SHARE, phase)
        blocks, splits = (n + 255) // 256, (tiles + share - 1) // share
        inverse = gl.full([BM], 1.0, gl.float32, TOKEN)
        if phase == 1:
            _await(ARRIVALS + 1, True)
            inverse = _inverse(SQUARES, token, eps, HIDDEN, PARTS, BM)
        if phase == PHASES - 1:
            gdc_launch_dependents()
        for item in range(gl.program_id(0), blocks * splits, gl.num_programs(0)):
            block, split = item % blocks, item // blocks
            steps = gl.minimum(share, tiles - split * share)
            acc, i = _multiply(ring, none, i, steps, HALF, SCALE, ASYMMETRIC, BM, STAGES)
            if phase == 1:
                acc *= gl.expand_dims(inverse, 0)
                # rows r and r + 64 are in one thread
                gate, up = gl.split(acc.to(gl.bfloat16).reshape([2, 64, BM]).permute((1, 2, 0)))
                silu = silu_times(gate, up, True).to(gl.float32)
                _store_digits(silu, met, ACTIVE, ACTIVE_FACTS, block, blocks, HALF, BM)
            else:
                row = block * 256 + HALF * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, SUMS))
                at = gl.expand_dims((split * M + token) * n, 0) + gl.expand_dims(row, 1)
                inside = gl.expand_dims(token < M, 0) & gl.expand_dims(row < n, 1)
                gl.store(SHARES + at, acc, mask=inside)
        meeting = phase + (phase + 1) // 2  # a norm has a meeting of its own
        if phase == 1:
            _fence()
        _arrive(ARRIVALS + meeting)
        if phase != 1:
            if phase != PHASES - 1 or PHASES == 4:
                _await(ARRIVALS + meeting, True)
            first = HALF * gl.num_programs(0) + gl.program_id(0)
            if phase == 3:
                _sum(
                    SHARES, SQUARES, OUT, first, splits, M, eps, N[PHASES - 1], HIDDEN, PARTS, BM, MOST_SHARES
                )
            elif phase < PHASES - 1:
                _norm(
                    SHARES, RESIDUAL, MLP_NORM, NORM, NORMAL, NORMAL_FACTS, SQUARES, phase, first, splits, M,
                    stride, HIDDEN, PARTS, BM, MOST_SHARES,
                )  # fmt: skip
                _fence()
                _arrive(ARRIVALS + meeting + 1)


@gluon.jit
def _of(values, phase):
    """values[phase]"""
    value = gl.to_tensor(values[0])
    for p in gl.static_range(1, len(values)):
        value = gl.where(phase == p, values[p], value)
    return value


@gluon.jit
def _arrive(arrivals):
    """What this program has written is visible to those that see it arrive."""
    tl.debug_barrier()
    gl.atomic_add(arrivals, 1, sem="release", scope="gpu")


@gluon.jit
def _await(arrivals, FIRST: gl.constexpr):
    """Until both warp groups of all programs have arrived. FIRST: of a warp group's own the first thread asks
    alone: more of them would hold up the arrivals."""
    ONE: gl.constexpr = "mov.b32 t, %tid.x; and.b32 t, t, 127; setp.eq.b32 p, t, 0;"
    ALL: gl.constexpr = "setp.eq.b32 p, 0, 0;"
    while (
        gl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; " + (ONE if FIRST else ALL)
            + " mov.b32 $0, 0x7fffffff; @p ld.acquire.gpu.global.b32 $0, [$1]; }",
            "=r,l", [arrivals], dtype=gl.int32, is_pure=False, pack=1,
        ) < 2 * gl.num_programs(0)
    ):  # fmt: skip
        pass
    tl.debug_barrier()


@gluon.jit
def _fence():
    """What threads have written before it is what the copy engine reads after it."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _multiply(
    ring, none, i, steps, HALF: gl.constexpr, SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The next tiles of the ring: a warp group's half of their sum, [128, BM]."""
    w, scales, zeros, x, facts, ready, empty = ring
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, none.type.layout, 4)
    acc = _high_and_low(none.to(gl.float32))[0]
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    COLUMN: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    by_token = facts._reinterpret(gl.float32, [STAGES * 4, BM], _BY_COLUMN)
    for _ in range(steps):
        slot = i % STAGES
        part = slot * 2 + HALF
        mbarrier.wait(ready.index(slot), i // STAGES & 1)
        packed = w.index(part).reshape([128, 128]).load(OPERAND)
        scale = scales.index(part).reshape([128]).load(ROW)
        zero = zeros.index(part).reshape([128]).load(ROW)
        x_scales = by_token.index(slot * 4).load(COLUMN), by_token.index(slot * 4 + 1).load(COLUMN)
        x_sums = by_token.index(slot * 4 + 2).load(COLUMN), by_token.index(slot * 4 + 3).load(COLUMN)
        digits = x.index(slot).reshape([4 * BM, 128])
        left, right = digits.slice(0, 2 * BM).permute((1, 0)), digits.slice(2 * BM, 2 * BM).permute((1, 0))
        low = warpgroup_mma(_codes(packed, 0), left, none, use_acc=False, is_async=True)
        high = warpgroup_mma(_codes(packed, 1), right, none, use_acc=False, is_async=True)
        low = warpgroup_mma_wait(1, deps=[low])
        acc += _scaled(low, scale, zero, x_scales[0], x_sums[0], 0, SCALE, ASYMMETRIC)
        high = warpgroup_mma_wait(0, deps=[high])
        mbarrier.arrive(empty.index(slot), count=1)
        acc += _scaled(high, scale, zero, x_scales[1], x_sums[1], 1, SCALE, ASYMMETRIC)
        i += 1
    return acc, i


@triton.jit
def _codes(packed, RUN: tl.constexpr):
    """Of each byte the code of its low half, or 16 * (code - 8) of its high one, int8."""
    CODE: tl.constexpr = "and.b32 $0, $1, 0x0f0f0f0f;"
    HIGH: tl.constexpr = "lop3.b32 $0, $1, 0xf0f0f0f0, 0x80808080, 0x6a;"
    return tl.inline_asm_elementwise(
        HIGH if RUN else CODE, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
    )


@gluon.jit
def _high_and_low(sums):
    """Columns of high digits, columns of low ones: a thread has both of a token."""
    BM: gl.constexpr = sums.shape[1] // 2
    return gl.split(sums.reshape([sums.shape[0], 2, BM]).permute((0, 2, 1)))


@gluon.jit
def _scaled(
    sums, scales, zeros, x_scale, x_sum, RUN: gl.constexpr, SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr
):  # fmt: skip
    """What a run of inputs adds to the product, fp32, from `sums` int32 of `_codes` times digits."""
    high, low = _high_and_low(sums)
    value = (high * 256 + low).to(gl.float32)
    if ASYMMETRIC or RUN == 0:
        above = scales.to(gl.float32) * 0.0 - (0.0 if RUN else 8.0)
        if ASYMMETRIC:
            above -= ((zeros << (24 - 8 * RUN)) >> 24).to(gl.float32) * (16.0 if RUN else 1.0)
        value += gl.expand_dims(above, 1) * gl.expand_dims(x_sum, 0)
    scale = scale_of_run((scales,), RUN, SCALE).to(gl.float32) * (0.0625 if RUN else 1.0)
    return value * gl.expand_dims(x_scale, 0) * gl.expand_dims(scale, 1)


@gluon.jit
def _inverse(SQUARES, token, eps, HIDDEN: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr):
    """1 / the norm of tokens, from SQUARES [PARTS, BM]."""
    squares = token.to(gl.float32) * 0.0
    for part in gl.static_range(PARTS):
        squares += gl.load(SQUARES + part * BM + token, cache_modifier=".cg")
    return gl.rsqrt(squares / HIDDEN + eps)


@gluon.jit
def _shares_of(SHARES, token, k, splits, M, COUNT: gl.constexpr, MOST_SHARES: gl.constexpr):
    """The sum of SHARES [splits, M, COUNT] of a token at k, in order; 0 beyond COUNT."""
    total = k.to(gl.float32) * 0.0
    for s in gl.static_range(MOST_SHARES):
        at = SHARES + (s * M + token) * COUNT
        total += gl.load(at + k, mask=(k < COUNT) & (s < splits), other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def _norm(
    SHARES, RESIDUAL, MLP_NORM, NORM, CODES, FACTS, SQUARES, phase, first, splits, M, stride, HIDDEN: gl.constexpr,
    PARTS: gl.constexpr, BM: gl.constexpr, MOST_SHARES: gl.constexpr,
):  # fmt: skip
    """RESIDUAL += the sum of SHARES, rounded; that times the norm's weight as `Digits`, and its squares."""
    BY_LANE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    GROUPS: gl.constexpr = HIDDEN // 128
    group = gl.arange(0, 4, layout=gl.SliceLayout(1, BY_LANE))
    lane = gl.arange(0, 128, layout=gl.SliceLayout(0, BY_LANE))
    for item in range(first, M * PARTS, 2 * gl.num_programs(0)):
        token, part = item // PARTS, item % PARTS
        groups = part * 4 + group
        k = gl.expand_dims(groups * 128, 1) + gl.expand_dims(lane % 2 * 64 + lane // 2, 0)
        real = k < HIDDEN
        at = RESIDUAL + token * stride + k
        before = gl.load(at, mask=real, other=0.0, cache_modifier=".cg").to(gl.float32)
        if phase == 0:
            weight = gl.load(MLP_NORM + k, mask=real, other=0.0)
        else:
            weight = gl.load(NORM + k, mask=real, other=0.0)
        x = _shares_of(SHARES, token, k, splits, M, HIDDEN, MOST_SHARES)
        x = (x.to(gl.bfloat16).to(gl.float32) + before).to(gl.bfloat16)
        gl.store(at, x, mask=real)
        x = x.to(gl.float32)
        gl.store(SQUARES + part * BM + token, gl.sum(gl.sum(x * x, 1), 0))
        x *= weight.to(gl.float32)
        codes, scale = digits_of(x, gl.reduce(gl.abs(x), 1, larger), 1)
        inside = groups < GROUPS
        gl.store(FACTS + groups * BM + token, scale, mask=inside)
        gl.store(FACTS + (GROUPS + groups) * BM + token, gl.sum(codes, 1).to(gl.float32), mask=inside)
        place = gl.expand_dims((groups * 2 * BM + token) * 128, 1) + gl.expand_dims(lane, 0)
        gl.store(CODES + place, ((codes + 128) >> 8).to(gl.int8), mask=real)
        gl.store(CODES + BM * 128 + place, codes.to(gl.int8), mask=real)


@gluon.jit
def _sum(
    SHARES, SQUARES, OUT, first, splits, M, eps, COUNT: gl.constexpr, HIDDEN: gl.constexpr, PARTS: gl.constexpr,
    BM: gl.constexpr, MOST_SHARES: gl.constexpr,
):  # fmt: skip
    """OUT [M, COUNT] = the sum of SHARES over the norm of its token."""
    EACH: gl.constexpr = 128 * gl.num_warps()
    PIECES: gl.constexpr = (COUNT + EACH - 1) // EACH
    k = gl.arange(0, EACH, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    for item in range(first, M * PIECES, 2 * gl.num_programs(0)):
        token, at = item // PIECES, item % PIECES * EACH + k
        total = _shares_of(SHARES, token, at, splits, M, COUNT, MOST_SHARES)
        total *= _inverse(SQUARES, token, eps, HIDDEN, PARTS, BM)
        gl.store(OUT + token * COUNT + at, total.to(gl.bfloat16), mask=at < COUNT)


@gluon.jit
def _store_digits(x, met, CODES, FACTS, group, groups, HALF: gl.constexpr, BM: gl.constexpr):
    """x fp32 [64, BM], half of a group of `Digits` of BM tokens; the other warp group has the other."""
    TOKEN: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))
    token = gl.arange(0, BM, layout=TOKEN)
    largest = _meet_halves(met[0], gl.reduce(gl.abs(x), 0, larger), HALF)
    codes, scale = digits_of(x, larger(largest[0], largest[1]), 0)
    total = _meet_halves(met[1], gl.sum(codes, 0), HALF)
    if HALF == 0:
        gl.store(FACTS + group * BM + token, scale)
        gl.store(FACTS + (groups + group) * BM + token, (total[0] + total[1]).to(gl.float32))
    at = (group * 2 * BM + gl.expand_dims(token, 0)) * 128 + gl.expand_dims(row * 2 + HALF, 1)
    gl.store(CODES + at, ((codes + 128) >> 8).to(gl.int8))
    gl.store(CODES + BM * 128 + at, codes.to(gl.int8))


@gluon.jit
def _meet_halves(met, value, HALF: gl.constexpr):
    """What both warp groups have, [BM] each."""
    met.index(HALF).store(value)
    gl.inline_asm_elementwise(
        "bar.sync 15, 256; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return met.index(0).load(value.type.layout), met.index(1).load(value.type.layout)


@cache  # CUDA graphs hold its address
def meetings(device: torch.device) -> Tensor:
    """int32 [MEETINGS]: how many programs have come to each; whoever makes the digits of x sets them to 0."""
    return torch.zeros(MEETINGS, dtype=torch.int32, device=device)


def share_of(blocks: int, tiles: int, programs: int) -> int:
    """Tiles of K that a program takes at a time: the least time of all, where what an item takes beside its
    tiles counts as half of one."""

    def time(share: int) -> float:
        return triton.cdiv(blocks * triton.cdiv(tiles, share), programs) * (share + 0.5)

    return min(range(triton.cdiv(tiles, MOST_SHARES), tiles + 1), key=time)


def few_tokens(
    x: Digits, residual: Tensor, products: Sequence[TiledWeight], norms: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """q, k and v [T, width] of products o, gate_up, down, qkv; without the last one down's shares
    [S, T, hidden]."""
    device, room, tokens = residual.device, x.codes.shape[2], x.tokens
    programs, hidden = multiprocessors(device), residual.shape[1]
    n = tuple(weight.out_features for weight in products)
    tiles = tuple(weight.packed.shape[1] for weight in products)
    share = tuple(
        tiles[p] if p == 1 else share_of(triton.cdiv(n[p], ROWS), tiles[p], programs) for p in range(len(n))
    )
    splits = [triton.cdiv(t, s) for t, s in zip(tiles, share, strict=True)]
    split_outputs = [s * m for s, m in zip(splits, n, strict=True)]
    del split_outputs[1]
    shares = torch.empty(max(split_outputs) * tokens, device=device)
    normal = Digits.empty(tokens, hidden, room, device)
    active = Digits.empty(tokens, n[1] // 2, room, device)
    squares = torch.empty(triton.cdiv(hidden, PART), room, device=device)
    out = residual.new_empty(tokens, n[3]) if len(n) == 4 else shares
    _few_tokens[(programs,)](
        *chain.from_iterable(map(_of_digits, (x, normal, active))),
        *chain.from_iterable(_of_tiles(products[min(p, len(n) - 1)], 2 if p == 1 else 1) for p in range(4)),
        residual, *norms, normal.codes, normal.facts, squares, active.codes, active.facts, shares, out,
        meetings(device), tokens, residual.stride(0), eps,
        N=n, TILES=tiles, SHARE=share, PHASES=len(n), SCALE=DTYPES[products[0].scale.dtype],
        ASYMMETRIC=products[0].zero.numel() > 0, BM=room, ROWS=ROWS, PART=PART, MOST_SHARES=MOST_SHARES,
        STAGES=STAGES, REGISTERS=REGISTERS, num_warps=WARPS, maxnreg=(2 * REGISTERS + 24) // 3, launch_pdl=True,
    )  # fmt: skip
    return out if len(n) == 4 else shares[: splits[2] * tokens * hidden].view(splits[2], tokens, hidden)


def _of_digits(x: Digits) -> tuple[Any, Any]:
    """TMA descriptors of a tile's digits, both groups of it, and of their scales and sums."""
    room = x.codes.shape[2]
    return of_tokens(x.codes, (2, 2, room, GROUP), _SWIZZLED), of_tokens(x.facts, (2, 2, room), _FLAT)


def _of_tiles(weight: TiledWeight, halves: int) -> tuple[Any, Any, Any]:
    """TMA descriptors of what a program reads of a tile at once: its bytes, its scales, its zeros."""
    (count, tiles, rows, words), blocks = weight.packed.shape, ROWS // TILE_ROWS // 2
    shape, block = (halves, count // halves, tiles * rows), (halves, blocks // halves, rows)
    packed = of_weight(weight.packed, (*shape, 2 * words), torch.int8, (*block, 2 * words), _SWIZZLED)
    scale = of_weight(weight.scale, shape, torch.int32, block, _FLAT)
    zero = of_weight(weight.zero, shape, torch.int32, block, _FLAT) if weight.zero.numel() else scale
    return packed, scale, zero
