"""`chain` of one token on Hopper, in Gluon: one persistent kernel with a program per SM streams the weights.

As a kernel of its own, each product of one token loses 4 to 6 us at its start and end, and meanwhile the
weights of the next product do not arrive. Here one warp requests the weights of all four products in order
(TMA), as long as there is room. It waits for nothing else, so weights keep arriving while the programs wait
for each other between products. The other warps multiply 16 rows at a time with `mma.sync`, each warp one
tile of the inputs, and their sums are added in shared memory at the end of a product. Every program computes
the whole input of a product, norm included.

A rank of several has its part of o and down. The programs of all ranks that have the same outputs meet alone:
each writes its sums in fp32 into the memory of all ranks (`all_reduce.device` says how), adds up what has
come for it, and stores the total for the programs of its own GPU. The last row of the memory is for this
kernel alone: copy 0 for o, copy 1 for down. A program empties a place when it has read it. Another rank
writes there again a layer later, when it has this program's outputs of the other product, which follow
behind a barrier.

As the programs wait for each other, all of them must get an SM in the end. Other work on the GPU may be slow,
but must not wait for them.

The codes are multiplied as they leave the words, with the format's offset still added. What offset and zero
point contribute, their sum times the sum of the inputs, is subtracted from each run's product, in fp32.
quant/weight/tiles.py describes the layout.
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
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels import peer_memory
from qrt.kernels.act_mul.kernel import activated
from qrt.kernels.all_reduce.device import patient, words_of
from qrt.kernels.chain import UNIT
from qrt.kernels.gpu import multiprocessors
from qrt.kernels.launch import variant
from qrt.kernels.linear.device import DTYPES, of_weight, signals
from qrt.kernels.peer_memory import ranks_of
from qrt.kernels.rmsnorm.kernel import product
from qrt.kernels.sizes import cdiv, next_power_of_2
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.tiles import TiledScheme, TiledWeight

WARPS = 8  # that multiply; a chunk is one tile per warp, for UNIT outputs
STAGES = 4  # chunks on their way or waiting, 17 KB each; 6 and 8 were slower
REGISTERS = 96  # per thread: programs of the kernels before and after fit beside it
EMPTY = gl.constexpr(peer_memory.EMPTY)
_PATIENCE = gl.constexpr(peer_memory.PATIENCE)
_RANK = gl.constexpr(peer_memory.RANK)
_ROWS = gl.constexpr(peer_memory.ROWS)
_ROW_BYTES = gl.constexpr(peer_memory.ROW_BYTES)
_BLOCKS = gl.constexpr(peer_memory.BLOCKS)
BARRIERS = 3  # between the four products
_PACKED = gl.NVMMASharedLayout(128, 16, 4)
_BY_ROW = gl.NVMMASharedLayout(0, 32, 3)
_VECTOR = gl.SwizzledSharedLayout(1, 1, 1, [0])
_MATRIX = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
_CUBE = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])


@gluon.jit
def _one_token(
    o, o_scale, o_zero, gate_up, gate_up_scale, gate_up_zero, down, down_scale, down_zero, qkv, qkv_scale,
    qkv_zero, BIAS, X, RESIDUAL, MIDDLE, ATTENTION_OUT, MLP_NORM, MLP_OUT, NORM, O_OUT, ACTIVE, DOWN_OUT, OUT,
    ARRIVALS, PEERS, eps, factor,
    HIDDEN: gl.constexpr, ATTENDED: gl.constexpr, INNER: gl.constexpr, WIDTH: gl.constexpr,
    LONGEST: gl.constexpr, UNITS: gl.constexpr, PLANES: gl.constexpr, RUNS: gl.constexpr,
    SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, RAW: gl.constexpr, AFFINE: gl.constexpr,
    DOT: gl.constexpr, ACT: gl.constexpr, RANKS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (SMs,).

    o to qkv_zero are descriptors, flat because the launcher needs them so. LONGEST is the number of inputs
    that there is room for, UNITS the most units of one product that a program has.
    """
    words = gl.allocate_shared_memory(gl.int16, [STAGES, 1, WARPS, 16, 64], o.layout)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, 1, WARPS, 16], o_scale.layout)
    zeros = gl.allocate_shared_memory(gl.int32, [STAGES if ASYMMETRIC else 1, 1, WARPS, 16], o_scale.layout)
    ready, empty = signals(STAGES)
    fence_async_shared()
    ring = (words, scales, zeros, ready, empty)
    gl.warp_specialize(
        [
            (_work, (
                ring, BIAS, X, RESIDUAL, MIDDLE, ATTENTION_OUT, MLP_NORM, MLP_OUT, NORM, O_OUT, ACTIVE,
                DOWN_OUT, OUT, ARRIVALS, PEERS, eps, factor, HIDDEN, ATTENDED, INNER, WIDTH, LONGEST, UNITS,
                PLANES, RUNS, SCALE, ASYMMETRIC, RAW, AFFINE, DOT, ACT, RANKS, WARPS, STAGES,
            )),
            (_fetch, (
                ring, (o, o_scale, o_zero), (gate_up, gate_up_scale, gate_up_zero),
                (down, down_scale, down_zero), (qkv, qkv_scale, qkv_zero), HIDDEN, ATTENDED, INNER, WIDTH,
                PLANES, ASYMMETRIC, WARPS, STAGES,
            )),
        ],
        [1], [24],
    )  # fmt: skip


@gluon.jit
def _fetch(
    ring, o, gate_up, down, qkv, HIDDEN: gl.constexpr, ATTENDED: gl.constexpr, INNER: gl.constexpr,
    WIDTH: gl.constexpr, PLANES: gl.constexpr, ASYMMETRIC: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Request this program's units of the four products, in the order in which they are multiplied."""
    SPAN: gl.constexpr = PLANES * 64 * WARPS
    first, programs = gl.program_id(0), gl.num_programs(0)
    i = 0
    for unit in range(first, HIDDEN // 16, programs):
        i = _fetch_unit(ring, o, unit, i, (ATTENDED + SPAN - 1) // SPAN, ASYMMETRIC, WARPS, STAGES)
    for unit in range(first, INNER // 16, programs):
        CHUNKS: gl.constexpr = (HIDDEN + SPAN - 1) // SPAN
        i = _fetch_unit(ring, gate_up, unit, i, CHUNKS, ASYMMETRIC, WARPS, STAGES)
        i = _fetch_unit(ring, gate_up, unit + INNER // 16, i, CHUNKS, ASYMMETRIC, WARPS, STAGES)
    for unit in range(first, HIDDEN // 16, programs):
        i = _fetch_unit(ring, down, unit, i, (INNER + SPAN - 1) // SPAN, ASYMMETRIC, WARPS, STAGES)
    for unit in range(first, WIDTH // 16, programs):
        i = _fetch_unit(ring, qkv, unit, i, (HIDDEN + SPAN - 1) // SPAN, ASYMMETRIC, WARPS, STAGES)


@gluon.jit
def _fetch_unit(
    ring, weight, unit, i, CHUNKS: gl.constexpr, ASYMMETRIC: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Request the chunks of one unit. Tiles beyond the last input arrive as zeros, and so do their scales."""
    words, scales, zeros, ready, empty = ring
    BYTES: gl.constexpr = WARPS * 16 * (128 + 4 + 4 * ASYMMETRIC)
    block, row = unit // 4, unit % 4 * 16
    for chunk in range(CHUNKS):
        slot, tile = i % STAGES, chunk * WARPS
        arrived = ready.index(slot)
        mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1, pred=i >= STAGES)
        mbarrier.expect(arrived, BYTES)
        tma.async_copy_global_to_shared(weight[0], [block, tile, row, 0], arrived, words.index(slot))
        tma.async_copy_global_to_shared(weight[1], [block, tile, row], arrived, scales.index(slot))
        if ASYMMETRIC:
            tma.async_copy_global_to_shared(weight[2], [block, tile, row], arrived, zeros.index(slot))
        i += 1
    return i


@gluon.jit
def _work(
    ring, BIAS, X, RESIDUAL, MIDDLE, ATTENTION_OUT, MLP_NORM, MLP_OUT, NORM, O_OUT, ACTIVE, DOWN_OUT, OUT,
    ARRIVALS, PEERS, eps, factor,
    HIDDEN: gl.constexpr, ATTENDED: gl.constexpr, INNER: gl.constexpr, WIDTH: gl.constexpr,
    LONGEST: gl.constexpr, UNITS: gl.constexpr, PLANES: gl.constexpr, RUNS: gl.constexpr,
    SCALE: gl.constexpr, ASYMMETRIC: gl.constexpr, RAW: gl.constexpr, AFFINE: gl.constexpr,
    DOT: gl.constexpr, ACT: gl.constexpr, RANKS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply. Every program computes the norms and RESIDUAL's sums; only the first one writes them."""
    SPAN: gl.constexpr = PLANES * 64 * WARPS
    x = gl.allocate_shared_memory(DOT, [LONGEST // SPAN, WARPS, PLANES * 64], _MATRIX)
    totals = gl.allocate_shared_memory(gl.float32, [LONGEST // SPAN * RUNS, WARPS], _VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2 * UNITS, WARPS, 16], _MATRIX)
    operands = (x, totals, sums)
    i = 0
    gdc_wait()
    _take(x, totals, X, ATTENDED, RUNS)
    i = _product(O_OUT, None, PEERS, 0, ring, operands, i, HIDDEN, ATTENDED, UNITS, PLANES, RUNS, SCALE,
                 ASYMMETRIC, RAW, AFFINE, DOT, RANKS, WARPS, STAGES)  # fmt: skip
    _meet(ARRIVALS, 0)
    normal = _add_norm(x, RESIDUAL, O_OUT, ATTENTION_OUT, factor, MLP_NORM, MIDDLE, eps, HIDDEN)
    _give(x, totals, normal, RUNS)
    CHUNKS: gl.constexpr = (HIDDEN + SPAN - 1) // SPAN
    row = 0
    for _ in range(gl.program_id(0), INNER // 16, gl.num_programs(0)):
        gate, i = _unit(ring, x, totals, i, CHUNKS, PLANES, RUNS, SCALE, ASYMMETRIC, RAW, AFFINE, DOT, WARPS,
                        STAGES)  # fmt: skip
        sums.index(row).store(gate)
        up, i = _unit(ring, x, totals, i, CHUNKS, PLANES, RUNS, SCALE, ASYMMETRIC, RAW, AFFINE, DOT, WARPS,
                      STAGES)  # fmt: skip
        sums.index(UNITS + row).store(up)
        row += 1
    gate, up = _rows(sums, 0, UNITS).to(DOT).to(gl.float32), _rows(sums, UNITS, UNITS).to(DOT).to(gl.float32)
    _store_rows(ACTIVE, None, activated(gate, ACT, False).to(DOT).to(gl.float32) * up, INNER)
    _meet(ARRIVALS, 1)
    _take(x, totals, ACTIVE, INNER, RUNS)
    i = _product(DOWN_OUT, None, PEERS, 1, ring, operands, i, HIDDEN, INNER, UNITS, PLANES, RUNS, SCALE,
                 ASYMMETRIC, RAW, AFFINE, DOT, RANKS, WARPS, STAGES)  # fmt: skip
    _meet(ARRIVALS, 2)
    normal = _add_norm(x, MIDDLE, DOWN_OUT, MLP_OUT, factor, NORM, RESIDUAL, eps, HIDDEN)
    gdc_launch_dependents()
    if WIDTH:
        _give(x, totals, normal, RUNS)
        _product(OUT, BIAS, None, 0, ring, operands, i, WIDTH, HIDDEN, UNITS, PLANES, RUNS, SCALE, ASYMMETRIC,
                 RAW, AFFINE, DOT, RANKS, WARPS, STAGES)  # fmt: skip
    else:
        k = _inputs(HIDDEN, x)
        gl.store(OUT + k, normal, mask=(k < HIDDEN) & (gl.program_id(0) == 0))


@gluon.jit
def _meet(ARRIVALS, BARRIER: gl.constexpr):
    """Wait until every program is here and sees what the others wrote before.

    This also resets the barrier before this one for the next launch, as no program waits there any more.
    """
    tl.debug_barrier()
    gl.atomic_add(ARRIVALS + BARRIER, 1, sem="acq_rel", scope="gpu")
    while (  # only one thread polls: more of them would delay the arrivals
        gl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .b32 t; mov.b32 t, %tid.x; setp.eq.b32 p, t, 0;
            mov.b32 $0, 0x7fffffff; @p ld.acquire.gpu.global.b32 $0, [$1]; }""",
            "=r,l", [ARRIVALS + BARRIER], dtype=gl.int32, is_pure=False, pack=1,
        ) < gl.num_programs(0)
    ):  # fmt: skip
        pass
    tl.debug_barrier()
    if gl.program_id(0) == 0:
        gl.store(ARRIVALS + (BARRIER + 2) % 3, 0)


@gluon.jit
def _inputs(COUNT: gl.constexpr, x):
    """Return 0, 1, .. over the threads, up to a power of two that holds COUNT and one chunk's inputs."""
    LEAST: gl.constexpr = x.shape[1] * x.shape[2]
    PADDED: gl.constexpr = triton.next_power_of_2(COUNT if COUNT > LEAST else LEAST)
    return gl.arange(0, PADDED, layout=gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))


@gluon.jit
def _give(x, totals, values, RUNS: gl.constexpr):
    """Store a product's input, and the sum of the inputs of every run of a tile."""
    COUNT: gl.constexpr = values.shape[0]
    RUN: gl.constexpr = x.shape[2] // RUNS
    RUNS_IN_ALL: gl.constexpr = x.shape[0] * x.shape[1] * RUNS
    BY_RUN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // RUN, RUN // 8], [gl.num_warps(), 1], [1, 0])
    x._reinterpret(x.dtype, [RUNS_IN_ALL * RUN], _VECTOR).slice(0, COUNT).store(values)
    runs = x._reinterpret(x.dtype, [RUNS_IN_ALL, RUN], _MATRIX).slice(0, COUNT // RUN, dim=0).load(BY_RUN)
    total = gl.sum(runs.to(gl.float32), 1)
    total = total.reshape([COUNT // RUN // RUNS // x.shape[1], x.shape[1], RUNS]).permute((0, 2, 1))
    place = totals._reinterpret(gl.float32, [x.shape[0], RUNS, x.shape[1]], _CUBE)
    place.slice(0, total.shape[0], dim=0).store(total)
    tl.debug_barrier()  # else the compiler puts one into every turn of the loop that reads them


@gluon.jit
def _take(x, totals, X, COUNT: gl.constexpr, RUNS: gl.constexpr):
    """Load a product's input from X [COUNT], which other programs wrote."""
    k = _inputs(COUNT, x)
    _give(x, totals, gl.load(X + k, mask=k < COUNT, other=0.0, cache_modifier=".cg"), RUNS)


@gluon.jit
def _add_norm(x, RESIDUAL, ADDED, BEHIND, factor, WEIGHT, SUM, eps, COUNT: gl.constexpr):
    """Compute SUM = RESIDUAL + factor * norm(ADDED), and return its norm, rounded as in `add_rmsnorm`.

    BEHIND and WEIGHT are the weights of the norms, or None where a norm is absent.
    """
    k = _inputs(COUNT, x)
    real = k < COUNT
    if BEHIND is not None:
        behind = gl.load(BEHIND + k, mask=real, other=0.0).to(gl.float32)
    if WEIGHT is not None:
        weight = gl.load(WEIGHT + k, mask=real, other=0.0).to(gl.float32)
    residual = gl.load(RESIDUAL + k, mask=real, other=0.0, cache_modifier=".cg").to(gl.float32)
    added = gl.load(ADDED + k, mask=real, other=0.0, cache_modifier=".cg").to(gl.float32)
    if BEHIND is not None:
        added = _normal(added, behind, eps, COUNT, BEHIND.dtype.element_ty, True, x.dtype).to(gl.float32)
    if factor is not None:
        added = (added * factor).to(x.dtype).to(gl.float32)
    total = (residual + added).to(x.dtype)
    if gl.program_id(0) == 0:
        gl.store(SUM + k, total, mask=real)
    if WEIGHT is not None:
        total = _normal(total.to(gl.float32), weight, eps, COUNT, WEIGHT.dtype.element_ty, False, x.dtype)
    return total


@gluon.jit
def _own_rows(N: gl.constexpr, UNITS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the outputs of this program's units of N, [UNITS, 16]; some may be N or more."""
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(1, LAYOUT))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    first = (gl.program_id(0) + gl.num_programs(0) * unit) * 16
    return gl.expand_dims(first, 1) + gl.expand_dims(row, 0)


@gluon.jit
def _normal(
    wide, weight, eps, COUNT: gl.constexpr, OF_WEIGHT: gl.constexpr, ADDED: gl.constexpr, DTYPE: gl.constexpr
):  # fmt: skip
    """Return the RMSNorm of fp32 [COUNT], padded with zeros, in DTYPE; an fp32 weight takes it unrounded.

    ADDED: what is returned is added to something.
    """
    normal = wide * tl.rsqrt(gl.sum(wide * wide, 0) / COUNT + eps)
    if OF_WEIGHT != gl.float32:
        normal = normal.to(DTYPE).to(gl.float32)
    if ADDED:
        normal = product(normal, weight, True)
    else:
        normal = normal * weight
    return normal.to(DTYPE)


@gluon.jit
def _product(
    OUT, BIAS, PEERS, COPY: gl.constexpr, ring, operands, i, N: gl.constexpr, K: gl.constexpr,
    UNITS: gl.constexpr, PLANES: gl.constexpr, RUNS: gl.constexpr, SCALE: gl.constexpr,
    ASYMMETRIC: gl.constexpr, RAW: gl.constexpr, AFFINE: gl.constexpr, DOT: gl.constexpr,
    RANKS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute this program's units of OUT [N] = W [N, K] x + BIAS, if any; over all ranks with PEERS."""
    x, totals, sums = operands
    CHUNKS: gl.constexpr = (K + PLANES * 64 * WARPS - 1) // (PLANES * 64 * WARPS)
    row = 0
    for _ in range(gl.program_id(0), N // 16, gl.num_programs(0)):
        unit, i = _unit(ring, x, totals, i, CHUNKS, PLANES, RUNS, SCALE, ASYMMETRIC, RAW, AFFINE, DOT, WARPS,
                        STAGES)  # fmt: skip
        sums.index(row).store(unit)
        row += 1
    values = _rows(sums, 0, UNITS)
    if PEERS is not None:
        values = _over_ranks(PEERS, COPY, values, N, RANKS)
    _store_rows(OUT, BIAS, values, N)
    return i


@gluon.jit
def _over_ranks(PEERS, COPY: gl.constexpr, values, N: gl.constexpr, RANKS: gl.constexpr):
    """Return the sum over all ranks of this program's units, values [units, 16], the same bits on all."""
    words = words_of(PEERS, RANKS)
    LAYOUT: gl.constexpr = values.type.layout
    at = _own_rows(N, values.shape[0], LAYOUT)
    bits = values.to(gl.int32, bitcast=True)
    bits = gl.where(bits == EMPTY, 0, bits)
    for other in gl.static_range(RANKS):
        gl.store(_place(words, other, COPY, words[_RANK], RANKS) + at, bits, at < N)
    SOURCES: gl.constexpr = triton.next_power_of_2(RANKS)
    ALL: gl.constexpr = gl.BlockedLayout([SOURCES, 1, 1], [1, 2, 16], [1, gl.num_warps(), 1], [2, 1, 0])
    UNIT_ROWS: gl.constexpr = gl.SliceLayout(0, ALL)
    at = gl.expand_dims(_own_rows(N, values.shape[0], UNIT_ROWS), 0)
    BY_SOURCE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, ALL))
    source = gl.arange(0, SOURCES, layout=BY_SOURCE)
    source = gl.expand_dims(gl.expand_dims(source, 1), 2)
    place, inside = _place(words, 0, COPY, source, RANKS) + at, (at < N) & (source < RANKS)
    come = gl.load(place, mask=inside, other=0, volatile=True)
    started = words[_PATIENCE] * 0
    while gl.max(gl.max(gl.max((come == EMPTY).to(gl.int32), 2), 1), 0) > 0:
        started = patient(started, words[_PATIENCE])
        come = gl.load(place, mask=inside, other=0, volatile=True)
    tl.debug_barrier()  # several threads have a copy of each
    gl.store(place, gl.full(come.shape, EMPTY, gl.int32, ALL), inside)
    return gl.sum(come.to(gl.float32, bitcast=True), 0)


@gluon.jit
def _place(words, OTHER: gl.constexpr, COPY: gl.constexpr, source, RANKS: gl.constexpr):
    """Return pointers to what each `source` writes into the block of a rank, OTHER ranks behind this one."""
    row = (COPY * RANKS + source + 1) * words[_ROWS] - 1
    return (words[_BLOCKS + OTHER] + row * words[_ROW_BYTES]).to(gl.pointer_type(gl.int32))


@gluon.jit
def _unit(
    ring, x, totals, i, CHUNKS: gl.constexpr, PLANES: gl.constexpr, RUNS: gl.constexpr, SCALE: gl.constexpr,
    ASYMMETRIC: gl.constexpr, RAW: gl.constexpr, AFFINE: gl.constexpr, DOT: gl.constexpr,
    WARPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply the next CHUNKS of the stream: each warp's share [WARPS, 16] of a unit's 16 outputs."""
    words, scales, zeros, ready, empty = ring
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    INPUT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(2, MMA)
    acc = gl.zeros([WARPS, 16, 8], gl.float32, MMA)
    for chunk in range(CHUNKS):
        slot = i % STAGES
        mbarrier.wait(ready.index(slot), i // STAGES & 1)
        tile = words.index(slot).reshape([WARPS, 16, 64]).load(WEIGHT)
        scale_words = scales.index(slot).reshape([WARPS, 16]).load(BY_ROW)
        zero_words = scale_words
        if ASYMMETRIC:
            zero_words = zeros.index(slot).reshape([WARPS, 16]).load(BY_ROW)
        for run in gl.static_range(RUNS):
            part = gl.zeros([WARPS, 16, 8], gl.float32, MMA)
            for p in gl.static_range(run * (PLANES // RUNS), (run + 1) * (PLANES // RUNS)):
                plane = RAW(tile, 0, p, DOT, True)
                tokens = x.index(chunk).slice(p * 64, 64, dim=1).load(gl.SliceLayout(2, INPUT))
                # all 8 columns are copies of the one token
                part = mma_v2(plane, gl.expand_dims(tokens, 2).broadcast_to([WARPS, 64, 8]), part)
            part *= AFFINE[1]
            total = totals.index(chunk * RUNS + run).load(gl.SliceLayout(1, BY_ROW))
            offset = gl.zeros([WARPS, 16], gl.float32, BY_ROW) + AFFINE[0]
            if ASYMMETRIC:
                offset += ((zero_words << (24 - 8 * run)) >> 24).to(gl.float32)
            scale = ((scale_words >> (16 * run)) & 0xFFFF).to(gl.int16).to(SCALE, bitcast=True).to(gl.float32)
            above = offset * gl.expand_dims(total, 1)
            acc += (part - gl.expand_dims(above, 2)) * gl.expand_dims(scale, 2)
        mbarrier.arrive(empty.index(slot), count=1)
        i += 1
    return gl.max(acc, 2), i


@gluon.jit
def _rows(sums, FIRST: gl.constexpr, UNITS: gl.constexpr):
    """Return UNITS units from FIRST on, summed over the warps: [UNITS, 16]."""
    WARPS: gl.constexpr = sums.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WARPS, 1], [2, 1, 16], [WARPS, 1, 1], [2, 1, 0])
    cube = sums._reinterpret(gl.float32, sums.shape, _CUBE)
    return gl.sum(cube.slice(FIRST, UNITS, dim=0).load(LAYOUT), 1)


@gluon.jit
def _store_rows(OUT, BIAS, values, N: gl.constexpr):
    """Store this program's units of OUT [N] from values [units, 16], plus BIAS, if any."""
    LAYOUT: gl.constexpr = values.type.layout
    at = _own_rows(N, values.shape[0], LAYOUT)
    if BIAS is not None:
        values += gl.load(BIAS + at, mask=at < N, other=0.0).to(gl.float32)
    gl.store(OUT + at, values.to(OUT.dtype.element_ty), mask=at < N)


@cache  # CUDA graphs hold its address
def _arrivals(device: torch.device) -> Tensor:
    return torch.zeros(BARRIERS, dtype=torch.int32, device=device)


def _descriptors(weight: TiledWeight) -> tuple[Any, Any, Any]:
    """Return the TMA descriptors of a weight's words, scales and zeros, a chunk at a time."""
    blocks, tiles, rows, words = weight.packed.shape
    by_row = (blocks, tiles, rows), torch.int32, (1, WARPS, UNIT), _BY_ROW
    packed = of_weight(
        weight.packed, (blocks, tiles, rows, words), torch.int16, (1, WARPS, UNIT, words), _PACKED
    )
    scale = of_weight(weight.scale, *by_row)
    return packed, scale, of_weight(weight.zero, *by_row) if weight.zero.numel() else scale


def one_token(
    x: Tensor, residual: Tensor, products: Sequence[Sequence[Tensor]], bias: Tensor | None,
    norms: Sequence[Tensor | None], eps: float, scheme: str, act: str, scale: float, peers: Tensor | None,
) -> Tensor:  # fmt: skip
    """See the package's docstring.

    products   o, gate_up, down and qkv, which may be empty
    norms      attention_out, mlp_norm, mlp_out, norm; each may be None
    """
    kind = WEIGHT_SCHEMES[scheme]
    assert isinstance(kind, TiledScheme)
    raw, affine = kind.raw()
    *_, down, qkv = products
    weights = [TiledWeight(*tensors) for tensors in (*products[:3], qkv or down)]
    hidden, inner = weights[0].out_features, weights[1].out_features // 2
    width = weights[3].out_features if qkv else 0
    programs, planes = multiprocessors(x.device), 16 // kind.bits
    longest = max(next_power_of_2(max(x.shape[1], hidden, inner)), planes * 64 * WARPS)
    units = next_power_of_2(cdiv(max(hidden, inner, width), UNIT * programs))
    middle = torch.empty_like(residual)
    o_out, down_out = (torch.empty_like(residual) for _ in range(2))
    active, out = x.new_empty(1, inner), x.new_empty(1, width or hidden)
    kernel = variant(
        _one_token, HIDDEN=hidden, ATTENDED=x.shape[1], INNER=inner, WIDTH=width, LONGEST=longest,
        UNITS=units, PLANES=planes, RUNS=weights[0].runs, SCALE=DTYPES[weights[0].scale.dtype],
        ASYMMETRIC=weights[0].zero.numel() > 0, RAW=raw, AFFINE=affine, DOT=DTYPES[x.dtype], ACT=act,
        RANKS=ranks_of(peers), WARPS=WARPS, STAGES=STAGES, num_warps=WARPS, maxnreg=REGISTERS,
        launch_pdl=True,
    )  # fmt: skip
    kernel.launch(
        (programs,), *chain.from_iterable(map(_descriptors, weights)), bias, x, residual, middle, *norms,
        o_out, active, down_out, out, _arrivals(x.device), peers, eps, None if scale == 1.0 else scale,
    )  # fmt: skip
    return out
