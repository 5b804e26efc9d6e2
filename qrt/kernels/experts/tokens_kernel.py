"""Arrange what experts read, and add what they write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import variant
from qrt.kernels.linear.shared.places import Places
from qrt.kernels.sizes import cdiv

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _arrange(
    X, PERM, WEIGHTS, ORDER, EXPERTS, Y, count, K, READS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (places, cdiv(K, BLOCK))."""
    after_previous(launch_pdl)
    place = tl.program_id(0)
    assignment = place
    if ORDER is not None:
        assignment = tl.load(ORDER + place)
    if assignment >= count:
        return
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = assignment // READS if READS > 0 else place
    at = k
    if PERM is not None:
        expert = tl.load(EXPERTS + place // BM)
        at = tl.load(PERM + expert.to(tl.int64) * K + k, mask=k < K, other=0)
    x = tl.load(X + source.to(tl.int64) * K + at, mask=k < K, other=0.0)
    if WEIGHTS is not None:
        x = (x.to(tl.float32) * tl.load(WEIGHTS + assignment)).to(x.dtype)
    tl.store(Y + place.to(tl.int64) * K + k, x, mask=k < K)


@triton.jit
def _sum(SHARES, Y, size, K: tl.constexpr, BLOCK: tl.constexpr, launch_pdl: tl.constexpr):
    """Add K shares of `size` numbers in fp32, in their order; grid (cdiv(size, BLOCK),)."""
    after_previous(launch_pdl)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        total += tl.load(SHARES + tl.cast(size, tl.int64) * i + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(Y + at, total.to(Y.dtype.element_ty), mask=at < size)


def arrange(
    x: Tensor, places: Places, reads: int, perm: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return what each place reads of x, [places, K]; places without an assignment stay as they are.

    Place p reads row order[p] // reads, or row p if `reads` is 0. Its columns come in the order perm[e] of
    its expert, and are multiplied by the weight fp32 of its assignment and rounded.
    """
    k = x.shape[1]
    y = torch.empty(places.rows, k, dtype=x.dtype, device=x.device)
    kernel = variant(
        _arrange, READS=reads, BM=1 if places.order is None else places.block, BLOCK=_BLOCK,
        launch_pdl=overlaps(x.device),
    )  # fmt: skip
    kernel.launch(
        (places.rows, cdiv(k, _BLOCK)),
        x,
        perm,
        weights,
        places.order,
        places.experts,
        y,
        places.assignments,
        k,
    )
    return y


def add(shares: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of shares [k, T, H] in the order of k, in fp32, rounded once."""
    y = torch.empty(shares.shape[1:], dtype=dtype, device=shares.device)
    if y.numel():
        kernel = variant(_sum, K=shares.shape[0], BLOCK=_BLOCK, launch_pdl=overlaps(y.device))
        kernel.launch((cdiv(y.numel(), _BLOCK),), shares, y, y.numel())
    return y
