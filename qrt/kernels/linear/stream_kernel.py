"""The tiled weight-only product on Hopper for some dozens of tokens, in Gluon: an even stream of weights.

There the weights' bytes, the tokens' way out of the L2 cache and the tensor cores all count, and nothing may
wait for anything else. So a program takes an equal run of tiles, whatever row blocks they belong to: no last
wave of few. One warp asks for tiles (TMA) as long as there is room, and begins before the previous kernel is
done (programmatic dependent launch): only the tokens are waited for. The others unpack a plane of weights
while the one before multiplies: Y.T = W @ X.T with W as the register operand of wgmma, scaled and rounded as
in `hopper_kernel`. Where the tiles of a row block are several programs', the last to arrive adds their sums
in order.
Layout: quant/weight/tiles.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from qrt.kernels.linear.device import DTYPES, of_planes, of_tiles, signals, store_block
from qrt.kernels.linear.hopper_kernel import fetch_tile, tile_of, weights_of
from qrt.quant.weight.tiles import TiledWeight


@gluon.jit(do_not_specialize=["M", "tiles", "units", "most"])
def _stream(
    x_desc, w_desc, scale_desc, zero_desc, BIAS, Y, PARTS, ARRIVALS, M, N, tiles, units, most,
    J: gl.constexpr, PLANES: gl.constexpr, RUNS: gl.constexpr, SCALE: gl.constexpr,
    ASYMMETRIC: gl.constexpr, UNPACK: gl.constexpr, DOT: gl.constexpr, BIASED: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): of `units`, tiles of BN row blocks, an equal run; all M <= BM tokens.

    One more warp asks for the copies. most: programs that the tiles of a row block belong to, at most.
    """
    WORDS: gl.constexpr = RUNS if SCALE == gl.float32 else (RUNS + 1) // 2
    gdc_launch_dependents()
    first = gl.program_id(0) * units // gl.num_programs(0)
    steps = (gl.program_id(0) + 1) * units // gl.num_programs(0) - first
    x_smem = gl.allocate_shared_memory(DOT, [STAGES, PLANES, BM, J], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES, BN, 64, J], w_desc.layout)
    scale_smem = gl.allocate_shared_memory(gl.int32, [STAGES * WORDS, BN, 64], scale_desc.layout)
    zero_smem = gl.allocate_shared_memory(gl.int32, [STAGES if ASYMMETRIC else 1, BN, 64], scale_desc.layout)
    ready, empty = signals(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, w_smem, scale_smem, zero_smem, ready, empty, BIAS, Y, PARTS, ARRIVALS, first, steps,
                M, N, tiles, units, most, J, PLANES, RUNS, SCALE, ASYMMETRIC, UNPACK, DOT, BIASED, BM, BN,
                STAGES, WORDS, num_warps,
            )),
            (_fetch, (
                x_desc, w_desc, scale_desc, zero_desc, x_smem, w_smem, scale_smem, zero_smem, ready, empty,
                first, steps, tiles, J, PLANES, ASYMMETRIC, BM, BN, STAGES, WORDS,
            )),
        ],
        [1], [24],
    )  # fmt: skip


@gluon.jit
def _fetch(
    x_desc, w_desc, scale_desc, zero_desc, x_smem, w_smem, scale_smem, zero_smem, ready, empty, first, steps,
    tiles, J: gl.constexpr, PLANES: gl.constexpr, ASYMMETRIC: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Ask for the units in order: as many weights as fit, then, when they are there, the tokens."""
    BYTES: gl.constexpr = PLANES * BM * J * 2 + BN * 64 * (J * 2 + 4 * WORDS + 4 * ASYMMETRIC)
    block, tile = first // tiles * BN, first % tiles
    for i in range(gl.minimum(steps, STAGES)):
        fetch_tile(
            w_desc, scale_desc, zero_desc, w_smem, scale_smem, zero_smem, ready.index(i), i, block, tile,
            BYTES, WORDS, ASYMMETRIC,
        )  # fmt: skip
        tile += 1
        if tile == tiles:
            block, tile = block + BN, 0
    gdc_wait()
    for i in range(gl.minimum(steps, STAGES)):
        at = (first + i) % tiles * PLANES
        tma.async_copy_global_to_shared(x_desc, [at, 0, 0], ready.index(i), x_smem.index(i))
    for i in range(STAGES, steps):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1)
        fetch_tile(
            w_desc, scale_desc, zero_desc, w_smem, scale_smem, zero_smem, ready.index(slot), slot, block,
            tile, BYTES, WORDS, ASYMMETRIC,
        )  # fmt: skip
        tma.async_copy_global_to_shared(x_desc, [tile * PLANES, 0, 0], ready.index(slot), x_smem.index(slot))
        tile += 1
        if tile == tiles:
            block, tile = block + BN, 0


@gluon.jit
def _multiply(
    x_smem, w_smem, scale_smem, zero_smem, ready, empty, BIAS, Y, PARTS, ARRIVALS, first, steps, M, N, tiles,
    units, most, J: gl.constexpr, PLANES: gl.constexpr, RUNS: gl.constexpr, SCALE: gl.constexpr,
    ASYMMETRIC: gl.constexpr, UNPACK: gl.constexpr, DOT: gl.constexpr, BIASED: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply the units as they come; write a row block's sum when it, or the program, is done."""
    ROWS: gl.constexpr = BN * 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    gdc_wait()  # asleep: a wait for the first slot would keep asking while the kernel before works
    acc = gl.zeros([ROWS, BM], gl.float32, MMA)
    block, tile = first // tiles, first % tiles
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(ready.index(slot), i // STAGES & 1)
        words, scales, zeros = tile_of(w_smem, scale_smem, zero_smem, slot, WORDS, ASYMMETRIC, OPERAND)
        x = x_smem.index(slot).reshape([PLANES * BM, J])
        plane = weights_of(words, scales, zeros, 0, PLANES, RUNS, SCALE, ASYMMETRIC, UNPACK, DOT)
        for p in gl.static_range(PLANES):
            acc = warpgroup_mma(plane, x.slice(p * BM, BM).permute((1, 0)), acc, is_async=True)
            following = plane
            if p + 1 < PLANES:  # while this plane multiplies
                following = weights_of(
                    words, scales, zeros, p + 1, PLANES, RUNS, SCALE, ASYMMETRIC, UNPACK, DOT
                )
            acc, plane = warpgroup_mma_wait(0, deps=[acc, plane])
            plane = following
        mbarrier.arrive(empty.index(slot), count=1)
        tile += 1
        if (tile == tiles) | (i + 1 == steps):
            _finish(
                acc, BIAS, Y, PARTS, ARRIVALS, block, M, N, tiles, units, most, BIASED, BN, MMA, num_warps
            )
            acc = gl.zeros([ROWS, BM], gl.float32, MMA)
            block, tile = block + 1, 0


@gluon.jit
def _finish(
    acc, BIAS, Y, PARTS, ARRIVALS, block, M, N, tiles, units, most, BIASED: gl.constexpr,
    BN: gl.constexpr, MMA: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Write what a program has of BN row blocks: to Y if it is the whole sum, or the last part of it."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    programs = gl.num_programs(0)
    start = ((block * tiles + 1) * programs - 1) // units  # the program of its first unit
    sharers = ((block + 1) * tiles * programs - 1) // units - start + 1
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    last = True
    if sharers > 1:
        at = gl.expand_dims(row * COLUMNS, 1) + gl.expand_dims(column, 0)
        parts = PARTS + block.to(gl.int64) * most * (ROWS * COLUMNS) + at
        gl.store(parts + (gl.program_id(0) - start) * (ROWS * COLUMNS), acc)
        tl.debug_barrier()  # every share is stored before this program counts as arrived
        last = gl.atomic_add(ARRIVALS + block, 1, sem="acq_rel", scope="gpu") == sharers - 1
        if last:
            acc = gl.load(parts, cache_modifier=".cg")
            for s in range(1, sharers):
                acc += gl.load(parts + s * (ROWS * COLUMNS), cache_modifier=".cg")
            gl.store(ARRIVALS + block, 0)
    if last:
        first = block * BN * 64
        if BIASED:
            bias = gl.load(BIAS + first + row, mask=first + row < N, other=0.0)
            acc += gl.expand_dims(bias.to(gl.float32), 1)
        store_block(Y, acc.to(Y.dtype.element_ty), first, 0, M, N, num_warps)


class StreamPlan(NamedTuple):
    """How `_stream` is launched for one shape. The 4 warps of the copies give their registers away."""

    blocks: int  # BN
    stages: int
    warps: int
    registers: int  # of a thread
    programs: int  # an SM


def stream_gemm(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, y: Tensor, layout: dict[str, Any], plan: StreamPlan
) -> None:
    """y [T, N] = x [T, K] @ W.T + bias; x contiguous, at most 64 tokens, one that `hopper_kernel.fits`."""
    blocks, tiles, rows, words = weight.packed.shape
    units = triton.cdiv(blocks, plan.blocks) * tiles
    programs = min(multiprocessors(x.device) * plan.programs, units)
    most = min(tiles, (tiles - 2) // (units // programs) + 2)
    width = max(16, triton.next_power_of_2(x.shape[0]))
    part = units // tiles * most * plan.blocks * rows * width if most > 1 else 0
    _stream[(programs,)](
        of_planes(x, layout["PLANES"], width, words), *of_tiles(weight, plan.blocks), bias, y,
        torch.empty(part, device=x.device), weight.arrivals, x.shape[0], y.shape[1], tiles, units, most,
        J=words, PLANES=layout["PLANES"], RUNS=layout["RUNS"], SCALE=layout["SCALE"],
        ASYMMETRIC=layout["ASYMMETRIC"], UNPACK=layout["UNPACK"], DOT=DTYPES[x.dtype],
        BIASED=bias is not None, BM=width, BN=plan.blocks, STAGES=plan.stages, num_warps=plan.warps,
        maxnreg=plan.registers, launch_pdl=True,
    )  # fmt: skip
