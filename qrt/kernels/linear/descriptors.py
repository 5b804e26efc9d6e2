"""TMA descriptors of weights and activations: what the bulk copy engine brings into shared memory, and how it
lies there (`gl.NVMMASharedLayout`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qrt.quant.weight.tiles import TiledWeight

SWIZZLED = {words: gl.NVMMASharedLayout(words * 2, 16, 3) for words in (32, 64)}  # by words of a tile's row
FLAT = gl.NVMMASharedLayout(0, 32, 2)
_kept = WeakTensorKeyDictionary()  # weight -> block -> descriptor: making one costs the host 20 us


class _Place(NamedTuple):
    """As much of a tensor as Triton asks a descriptor's for, without keeping its memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def of_weight(
    weight: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    block: Sequence[int],
    layout: gl.NVMMASharedLayout,
) -> Any:
    """TMA descriptor: blocks `block` of a contiguous weight seen as `shape` of `dtype`. Kept like it."""
    known = _kept.setdefault(weight, {})
    if (found := known.get(tuple(block))) is None:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        place = _Place(weight.data_ptr(), dtype)
        found = known[tuple(block)] = TensorDescriptor(place, list(shape), strides, list(block), layout)
    return found


def of_tiles(weight: TiledWeight, blocks: int) -> tuple[Any, Any, Any]:
    """TMA descriptors of a tile of so many row blocks: its words, its scales and its zeros."""
    count, tiles, rows, words = weight.packed.shape
    packed = weight.packed, (count, tiles * rows, words), torch.int16, (blocks, rows, words)
    by_row, runs = (blocks, rows), weight.scale.nbytes // count // 4
    scale = of_weight(weight.scale, (count, runs), torch.int32, by_row, FLAT)
    zero = scale
    if weight.zero.numel():
        zero = of_weight(weight.zero, (count, tiles * rows), torch.int32, by_row, FLAT)
    return of_weight(*packed, SWIZZLED[words]), scale, zero


def of_planes(x: Tensor, planes: int, tokens: int, words: int) -> Any:
    """TMA descriptor of x [T, K] by planes of `words` inputs: so many of them of so many tokens."""
    by_plane = aligned(x).unflatten(1, (-1, words)).transpose(0, 1)
    return of_tokens(by_plane, (planes, tokens, words), SWIZZLED[words])


def of_tokens(x: Tensor, block: Sequence[int], layout: gl.NVMMASharedLayout) -> Any:
    """TMA descriptor of activations."""
    return TensorDescriptor.from_tensor(x, list(block), layout)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it if it does not begin where the copy engine can read."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
