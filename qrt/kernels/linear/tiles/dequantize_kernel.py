"""Multiply weight-only codes in tiles by many tokens, on any GPU.

The weight is dequantized block by block to scratch, and torch multiplies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.launch import variant
from qrt.kernels.linear.tiles.device import TileConstants, scale_of_run, zero_of_run
from qrt.quant.weight.device import unit_of
from qrt.quant.weight.tiles import TILE_ROWS, TiledWeight

SCRATCH_BYTES = 64 << 20  # dequantized weight: near the L2 cache in size, and small beside a model


@triton.jit
def _dequantize(
    W, SCALES, ZEROS, OUT, TILES,
    K: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr, PLANES: tl.constexpr, RUNS: tl.constexpr,
    SCALE: tl.constexpr, ASYMMETRIC: tl.constexpr, UNPACK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Fill OUT [64 * row blocks, K] with (code - zero) * scale, rounded; grid (tiles, row blocks)."""
    WORDS: tl.constexpr = 1 if SCALE == tl.float32 else 2
    PER_RUN: tl.constexpr = PLANES // RUNS
    column = tl.program_id(0)
    block = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    words = tl.arange(0, J)
    tile = block.to(tl.int64) * TILES + column
    packed = tl.load(W + tile * (ROWS * J) + rows[:, None] * J + words[None, :])
    if ASYMMETRIC:
        zeros = tl.load(ZEROS + tile * ROWS + rows)
    for p in tl.static_range(PLANES):
        zero = zero_of_run(zeros, p // PER_RUN) if ASYMMETRIC else 0
        plane = UNPACK(packed, zero, p, OUT.dtype.element_ty, ASM).to(tl.float32)
        scales = SCALES + tile * (RUNS // WORDS * ROWS) + rows
        plane *= (scale_of_run(scales, p // PER_RUN, ROWS, SCALE) * unit_of(OUT.dtype.element_ty, ASM))[
            :, None
        ]
        k = (column * PLANES + p) * J + words
        out = OUT + (block * ROWS + rows).to(tl.int64)[:, None] * K + k[None, :]
        tl.store(out, plane.to(OUT.dtype.element_ty), mask=(k < K)[None, :])


def dequantized_gemm(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, y: Tensor, constants: TileConstants
) -> None:
    """Compute y [T, N] = x [T, K] @ W.T + bias by torch, from blocks of the dequantized weight."""
    blocks = max(1, SCRATCH_BYTES // (TILE_ROWS * x.shape[1] * x.itemsize))
    for first in range(0, weight.packed.shape[0], blocks):
        matrix = _dequantized(x, weight, slice(first, first + blocks), constants)
        columns = slice(first * TILE_ROWS, min((first + blocks) * TILE_ROWS, weight.out_features))
        matrix = matrix[: columns.stop - columns.start].T
        if bias is None:
            torch.mm(x, matrix, out=y[:, columns])
        else:
            torch.addmm(bias[columns], x, matrix, out=y[:, columns])


def _dequantized(x: Tensor, weight: TiledWeight, blocks: slice, constants: TileConstants) -> Tensor:
    """Return row blocks of the weight as [rows, K] in x's dtype."""
    packed, scale, zero = weight.packed[blocks], weight.scale[blocks], weight.zero[blocks]
    out = torch.empty(packed.shape[0] * TILE_ROWS, x.shape[1], dtype=x.dtype, device=x.device)
    kernel = variant(_dequantize, K=x.shape[1], **constants._asdict())
    kernel.launch(
        (packed.shape[1], packed.shape[0]), packed, scale.view(torch.int32), zero.view(torch.int32), out,
        packed.shape[1],
    )  # fmt: skip
    return out
