"""Arrange what experts read, and add what they write."""

from __future__ import annotations

from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import variant
from qrt.kernels.linear.shared.places import Places
from qrt.kernels.sizes import cdiv
from qrt.quant.tokens import QuantizedTokens

Rows = TypeVar("Rows", Tensor, QuantizedTokens)
_BLOCK = 1024
_ROWS, _ROW_BYTES = 8, 2048  # that a program arranges: few programs, with much on its way in each


@triton.jit(do_not_specialize=["count", "places"])
def _arrange(
    X, SCALES, PERM, WEIGHTS, ORDER, EXPERTS, Y, Y_SCALES, count, places, K, READS: tl.constexpr,
    BM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(places, ROWS), cdiv(K, BLOCK)): all of a program's rows are on their way at once."""
    after_previous(launch_pdl)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    assignment = place
    if ORDER is not None:
        assignment = tl.load(ORDER + place, mask=place < places, other=count)
    real = assignment < count
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = real[:, None] & (k < K)[None, :]
    source = assignment // READS if READS > 0 else place
    at = k[None, :]
    if PERM is not None:
        expert = tl.load(EXPERTS + place // BM, mask=real, other=0)
        at = tl.load(PERM + expert.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0)
    x = tl.load(X + source.to(tl.int64)[:, None] * K + at, mask=inside, other=0)
    if WEIGHTS is not None:
        weight = tl.load(WEIGHTS + assignment, mask=real, other=0.0)
        x = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
    tl.store(Y + place.to(tl.int64)[:, None] * K + k[None, :], x, mask=inside)
    if SCALES is not None and tl.program_id(1) == 0:
        tl.store(Y_SCALES + place, tl.load(SCALES + source, mask=real, other=0.0), mask=real)


@triton.jit
def _sum(SHARES, Y, size, K: tl.constexpr, BLOCK: tl.constexpr, launch_pdl: tl.constexpr):
    """Add K partial sums of `size` numbers in fp32, in their order; grid (cdiv(size, BLOCK),)."""
    after_previous(launch_pdl)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        total += tl.load(SHARES + tl.cast(size, tl.int64) * i + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(Y + at, total.to(Y.dtype.element_ty), mask=at < size)


def arrange(
    x: Rows, places: Places, reads: int, perm: Tensor | None = None, weights: Tensor | None = None
) -> Rows:
    """Return what each place reads of x, [places, K]; places without an assignment stay as they are.

    Place p reads row order[p] // reads, or row p if `reads` is 0. Its columns come in the order perm[e] of
    its expert, and are multiplied by the weight fp32 of its assignment and rounded, unless x is codes.
    """
    codes, scale = (x.codes, x.scale) if isinstance(x, QuantizedTokens) else (x, None)
    k = codes.shape[1]
    y = codes.new_empty(places.rows, k)
    y_scale = None if scale is None else scale.new_empty(places.rows)
    block = _ROW_BYTES // y.itemsize
    kernel = variant(
        _arrange, READS=reads, BM=1 if places.order is None else places.block, ROWS=_ROWS, BLOCK=block,
        launch_pdl=overlaps(y.device),
    )  # fmt: skip
    kernel.launch(
        (cdiv(places.rows, _ROWS), cdiv(k, block)), codes, scale, perm, weights, places.order,
        places.experts, y, y_scale, places.assignments, places.rows, k,
    )  # fmt: skip
    return x._replace(codes=y, scale=y_scale) if isinstance(x, QuantizedTokens) else y


def add(partial_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of partial sums [k, T, H] in the order of k, in fp32, rounded once."""
    y = torch.empty(partial_sums.shape[1:], dtype=dtype, device=partial_sums.device)
    if y.numel():
        kernel = variant(_sum, K=partial_sums.shape[0], BLOCK=_BLOCK, launch_pdl=overlaps(y.device))
        kernel.launch((cdiv(y.numel(), _BLOCK),), partial_sums, y, y.numel())
    return y
