"""Sizes of a quantized checkpoint before it is written, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch

from qrt.quant.checkpoint import Checkpoint
from qrt.quant.checkpoint.layout import PackQuantized
from qrt.quant.spec import TensorSpec
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate.recipe.recipe import LinearRecipe

COUNTED = "bits per weight, scales and zero points included, over all Linears in the layers"
SHAPE_BYTES = 16  # bytes of the weight_shape that packed formats store


def output_bytes(checkpoint: Checkpoint, written: Mapping[str, LinearRecipe], dtype: torch.dtype) -> int:
    """Return the bytes of all tensors once the Linears `written` are quantized, with scales in `dtype`."""
    size = checkpoint.num_bytes
    for name, grid in written.items():
        stored = checkpoint.spec(f"{name}.weight")
        size += stored_bytes(stored, grid, dtype) - stored.num_bytes
    return size


def stored_bytes(weight: TensorSpec, grid: LinearRecipe, dtype: torch.dtype) -> int:
    """Return the bytes of all tensors of one quantized Linear, its bias left out."""
    shape = SHAPE_BYTES if WEIGHT_SCHEMES[grid.scheme].stored == PackQuantized.name else 0
    return linear_bytes(weight, grid, dtype) + shape


def linear_bytes(weight: TensorSpec, grid: LinearRecipe | None, dtype: torch.dtype) -> int:
    """Return the bytes of one Linear that `bits_per_weight` counts: codes, scales and zero points on `grid`.

    Without a grid the Linear stays unchanged, and its weight counts.
    """
    if grid is None:
        return weight.num_bytes
    (rows, inputs), spec = weight.shape, grid.spec
    groups = inputs // spec.group_of(inputs)
    scales = rows * groups * dtype.itemsize
    if WEIGHT_SCHEMES[grid.scheme].stored != PackQuantized.name:
        return rows * inputs + scales
    zeros = 0 if spec.symmetric else groups * _in_words(rows * spec.bits)
    return rows * _in_words(inputs * spec.bits) + scales + zeros


def linear_weights(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    """Count the weights of the Linears `names`."""
    return sum(prod(checkpoint.spec(f"{name}.weight").shape) for name in names)


def bits_per_weight(
    checkpoint: Checkpoint, grids: Mapping[str, LinearRecipe | None], dtype: torch.dtype
) -> float:
    """Return the bits per weight of the result: `linear_bytes` over the weights of all Linears in the layers.

    Linears that stay unchanged count; embedding, head, norms, biases and routers do not.
    """
    total = sum(linear_bytes(checkpoint.spec(f"{name}.weight"), grid, dtype) for name, grid in grids.items())
    return 8 * total / linear_weights(checkpoint, grids)


def _in_words(bits: int) -> int:
    """Return the bytes of the 32-bit words that hold `bits` bits."""
    return -(-bits // 32) * 4


def gigabytes(count: int) -> str:
    """Return a number of bytes in GB, for the screen."""
    return f"{count / 1e9:.2f} GB"
