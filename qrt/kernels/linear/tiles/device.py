"""Constants of a tiled weight, and how its scales and zeros are read: what kernels over tiles share."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.launch import COMPILED
from qrt.quant.weight.tiles import TILE_ROWS, TiledWeight

TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}  # Triton's dtypes


def dot_type(x: Tensor) -> tl.dtype:
    """Return x's dtype; in the interpreter fp32, as it would multiply bf16 as bit patterns."""
    return TL[x.dtype] if COMPILED else tl.float32


class TileConstants(NamedTuple):
    """The constants that describe a tiled weight to its kernels.

    ROWS         rows of a tile
    J            words of a tile's row, and inputs of a plane
    PLANES       planes of a tile
    RUNS         runs of a tile, each with its own scales
    SCALE        dtype of the scales
    ASYMMETRIC   whether there are zero points
    UNPACK       `TiledScheme.unpacker`
    ASM          whether UNPACK may use inline PTX
    """

    ROWS: int
    J: int
    PLANES: int
    RUNS: int
    SCALE: Any
    ASYMMETRIC: bool
    UNPACK: Any
    ASM: bool


def constants_of(weight: TiledWeight, bits: int, unpack: Any) -> TileConstants:
    """Return the constants of a weight; `unpack` is its `TiledScheme.unpacker`."""
    scale = weight.scale
    return _cached(weight.packed.shape[3], weight.runs, scale.dtype, weight.zero.numel() > 0, bits, unpack)


@cache
def _cached(
    words: int, runs: int, scale: torch.dtype, asymmetric: bool, bits: int, unpack: Any
) -> TileConstants:  # fmt: skip
    return TileConstants(TILE_ROWS, words, 16 // bits, runs, TL[scale], asymmetric, unpack, COMPILED)


@triton.jit
def scale_of_run(ptr, run: tl.constexpr, ROWS: tl.constexpr, SCALE: tl.constexpr):
    """Load the scale of `run` of each row, fp32; 16-bit ones in pairs, as a copy moves 4 bytes or more."""
    if SCALE == tl.float32:
        return tl.load(ptr + run * ROWS).to(tl.float32, bitcast=True)
    else:
        pair = tl.load(ptr + run // 2 * ROWS)
        return ((pair >> (run % 2 * 16)) & 0xFFFF).to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)


@triton.jit
def zero_of_run(zeros, run: tl.constexpr):
    """Return signed byte `run` of each row's word, [ROWS, 1]."""
    return ((zeros << (24 - 8 * run)) >> 24)[:, None]
