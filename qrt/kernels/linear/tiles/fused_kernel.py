"""The product of a few tokens with weight-only codes in tiles, on any GPU.

One kernel reads every weight once and is bound by that read. It computes W @ x^T, so that the unpacked
weights are the register operand of the tensor core and never touch shared memory. Codes stay exact small
integers; scales multiply fp32 sums of groups. Where N / 64 programs would leave SMs idle, K is split. The
last program of a row block to arrive adds the partial sums in split order: results do not depend on timing.
Layout: quant/weight/tiles.py. A format is its `unpack` device function.

A mixture's tokens come in blocks of `Places`, each of which meets the weight of its expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.act_mul.kernel import act_times
from qrt.kernels.gpu import overlaps, shared_bytes
from qrt.kernels.launch import variant
from qrt.kernels.linear.shared.device import places_of, rows_of, sum_splits
from qrt.kernels.linear.shared.places import Grouped
from qrt.kernels.linear.tiles.device import TileConstants, dot_type, scale_of_run, zero_of_run
from qrt.kernels.linear.tiles.plans import FusedPlan, width_of
from qrt.quant.weight.device import unit_of
from qrt.quant.weight.tiles import TiledWeight

SMALL_BYTES = 4 << 10  # shared memory for scales and zeros


@triton.jit(do_not_specialize=["M"])
def _fused(  # noqa: C901 -- its branches are constants
    X, W, SCALES, ZEROS, BIAS, Y, PARTS, ARRIVALS, ORDER, EXPERTS, WEIGHTS, M, N, each,
    K: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr, PLANES: tl.constexpr, RUNS: tl.constexpr,
    SCALE: tl.constexpr, ASYMMETRIC: tl.constexpr, UNPACK: tl.constexpr, ASM: tl.constexpr,
    DOT: tl.constexpr, BIASED: tl.constexpr, BM: tl.constexpr, BLOCKS: tl.constexpr, HALVES: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ACT: tl.constexpr, READS: tl.constexpr,
    SHARES: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Multiply over a grid (row blocks / BLOCKS, SPLITS): Y [M, N] = X [M, K] @ W.T, M <= BM.

    BLOCKS divides the row blocks, and every split has a tile. With two HALVES the two blocks are the gate and
    the up of the same columns: Y [M, N / 2].

    With EXPERTS the grid has a third size, blocks of places of M assignments. A weight has `each` tiles.
    """
    TILE: tl.constexpr = PLANES * J
    TILES: tl.constexpr = (K + TILE - 1) // TILE
    SHARE: tl.constexpr = (TILES + SPLITS - 1) // SPLITS
    WORDS: tl.constexpr = 1 if SCALE == tl.float32 else 2  # scales in a 32-bit word
    PER_RUN: tl.constexpr = PLANES // RUNS
    block = tl.program_id(0)
    split = tl.program_id(1)
    first = split * SHARE
    rows = tl.arange(0, BLOCKS * ROWS)
    words = tl.arange(0, J)
    tile = block * (BLOCKS // HALVES * TILES) + first
    counter = block
    if EXPERTS is None:
        tokens = tl.arange(0, BM)
        source, target, real = tokens, tokens, tokens < M
    else:
        if launch_pdl:
            gdc_wait()
        expert, tokens, place, real = places_of(ORDER, EXPERTS, tl.program_id(2), M, BM)
        if expert < 0:
            return
        source, target = rows_of(tokens, place, M, READS, SHARES)
        tile += expert * each
        if BIASED:
            BIAS += expert * N
        if SPLITS > 1:  # an expert may have several blocks
            counter += expert * N + tl.program_id(2) * tl.num_programs(0)
    live = real[None, :]
    apart = N // (HALVES * ROWS) * TILES if HALVES > 1 else TILES  # tiles between two of the blocks
    further, row = rows // ROWS * apart, rows % ROWS
    wp = W + tile.to(tl.int64) * (ROWS * J) + ((further * ROWS + row) * J)[:, None] + words[None, :]
    sp = SCALES + (tile + further) * (RUNS // WORDS * ROWS) + row
    zp = ZEROS + (tile + further) * ROWS + row
    xp = X + source[None, :] * K + first * TILE + words[:, None]
    acc = tl.zeros([BLOCKS * ROWS, BM], tl.float32)
    steps = SHARE if TILES % SHARE == 0 else tl.minimum(SHARE, TILES - first)
    if launch_pdl and EXPERTS is None:
        gdc_wait()
    for i in tl.range(0, steps, num_stages=STAGES):
        packed = tl.load(wp, eviction_policy="evict_first")
        if ASYMMETRIC:
            zeros = tl.load(zp)
        for run in tl.static_range(RUNS):
            part = tl.zeros([BLOCKS * ROWS, BM], tl.float32)
            for p in tl.static_range(run * PER_RUN, (run + 1) * PER_RUN):
                plane = UNPACK(packed, zero_of_run(zeros, run) if ASYMMETRIC else 0, p, DOT, ASM)
                inside = live
                if K % TILE:
                    inside = live & ((first + i) * TILE + p * J + words < K)[:, None]
                x = tl.load(xp + p * J, mask=inside, other=0.0)
                part = tl.dot(plane, x.to(DOT), part, input_precision="ieee")
            acc += part * scale_of_run(sp, run, ROWS, SCALE)[:, None]
        wp += ROWS * J
        sp += RUNS // WORDS * ROWS
        zp += ROWS
        xp += TILE

    if launch_pdl:  # not earlier, or programs of the next kernel would take the places of this one's
        gdc_launch_dependents()
    acc *= unit_of(DOT, ASM)
    n = block * (BLOCKS // HALVES * ROWS) + (row + rows // ROWS * (N // 2) if HALVES > 1 else rows)
    inside = live & (n < N)[:, None]
    last = True
    if SPLITS > 1:
        if EXPERTS is None:
            at = n[:, None] * M + tokens[None, :]
        else:  # few of the tokens are real
            at = tokens[None, :] * N + n[:, None]
        acc, last = sum_splits(acc, PARTS, ARRIVALS + counter, at, inside, M * N, split, SPLITS)
    if last:
        if BIASED:
            acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if WEIGHTS is not None:
            acc *= tl.load(WEIGHTS + tokens, mask=real, other=0.0)[None, :]
        y = acc.to(Y.dtype.element_ty)
        if HALVES > 1:  # rows r and r + 64 are in one thread
            gate, up = tl.split(tl.permute(tl.reshape(y, (HALVES, ROWS, BM)), (1, 2, 0)))
            output = target[None, :] * (N // 2) + (block * ROWS + tl.arange(0, ROWS))[:, None]
            tl.store(Y + output, act_times(gate, up, ACT, ASM), mask=tl.broadcast_to(live, (ROWS, BM)))
        else:
            tl.store(Y + target[None, :] * N + n[:, None], y, mask=inside)


def fused_gemm(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, y: Tensor, constants: TileConstants,
    chosen: FusedPlan, act: str | None = None, group: Grouped | None = None,
) -> None:  # fmt: skip
    """Compute y [T, N] = x [T, K] @ W.T + bias for a few tokens.

    With `act`, by a plan that `gates`, y [T, N / 2] is act(gate) * up of it. With a `group` the weight is
    that of all experts, stacked, and K may be split for `act` too.
    """
    k, n, device = x.shape[1], weight.arrivals.shape[-1], x.device
    blocks, tiles, rows, words = weight.packed.shape[-4:]
    places = None if group is None else group.places
    width, count = (width_of(len(x)), len(x)) if places is None else (places.block, places.assignments)
    stage_bytes = chosen.blocks * rows * words * 2 + constants.PLANES * words * width * x.itemsize
    parts, zero = None, weight.zero.flatten()
    if chosen.splits > 1:
        parts = torch.empty(chosen.splits * n * count, dtype=torch.float32, device=device)
    kernel = variant(
        _fused, K=k, DOT=dot_type(x), BIASED=bias is not None, BM=width, BLOCKS=chosen.blocks,
        HALVES=2 if act else 1, SPLITS=chosen.splits, STAGES=_stages(device, stage_bytes, chosen.stages),
        ACT=act, READS=group.reads if group else 0, SHARES=group.partial_sums if group else 0,
        num_warps=chosen.warps, **constants._asdict(), launch_pdl=overlaps(device),
    )  # fmt: skip
    grid: tuple[int, ...] = (blocks // chosen.blocks, chosen.splits)
    grouped: tuple[Tensor | None, ...] = (None, None, None)
    if group is not None and places is not None:
        grid, grouped = (*grid, len(places.experts)), (places.order, places.experts, group.weights)
    kernel.launch(
        grid, x, weight.packed, weight.scale.view(torch.int32), zero.view(torch.int32), bias, y, parts,
        weight.arrivals, *grouped, count, n, blocks * tiles if group else None,
    )  # fmt: skip


def _stages(device: torch.device, stage_bytes: int, most: int) -> int:
    """Return how many tiles are in flight: as many as shared memory holds, up to `most`."""
    return max(1, min(most, (shared_bytes(device) - SMALL_BYTES) // stage_bytes))
