"""Multiply int8 codes by int8 codes on any GPU: int8 tensor cores, scales and bias in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import variant
from qrt.kernels.linear.int8.plans import BlockPlan
from qrt.kernels.linear.shared.device import in_panels, split_evenly, sum_splits
from qrt.kernels.sizes import cdiv
from qrt.quant.tokens import QuantizedTokens


@triton.jit(do_not_specialize=["M"])
def _int8_gemm(
    A, TOKEN_SCALES, B, SCALES, BIAS, Y, PARTS, ARRIVALS, M, N, K, share,
    BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PANEL: tl.constexpr,
    SPLITS: tl.constexpr, SHARES: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Multiply over a grid (cdiv(M, BM) * cdiv(N, BN), SPLITS), `share` inputs a split, in whole blocks.

    Y.T = B [N, K] @ A [M, K].T, so that few tokens waste little of the tensor cores. If SHARES, Y [SPLITS, M,
    N] takes the sum of each split.
    """
    token, row = in_panels(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), PANEL)
    m = token * BM + tl.arange(0, BM)
    n = row * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a = A + m.to(tl.int64)[None, :] * K + k[:, None]
    b = B + n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BN, BM], tl.int32)
    split = tl.program_id(1)
    a += split * share
    b += split * share
    if launch_pdl:
        gdc_wait()
    for start in range(split * share, tl.minimum(split * share + share, K), BK):
        inside = k < K - start
        left = tl.load(b, mask=(n < N)[:, None] & inside[None, :], other=0)
        right = tl.load(a, mask=(m < M)[None, :] & inside[:, None], other=0)
        acc = tl.dot(left, right, acc, out_dtype=tl.int32)
        a += BK
        b += BK
    if launch_pdl:  # not earlier, or programs of the next kernel would take the places of this one's
        gdc_launch_dependents()
    real = (m < M)[None, :] & (n < N)[:, None]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    last = True
    if SHARES:
        Y += split.to(tl.int64) * M * N
    elif SPLITS > 1:
        arrivals = ARRIVALS + tl.program_id(0)
        acc, last = sum_splits(acc, PARTS, arrivals, at, real, M * N, split, SPLITS)
    if last:
        y = acc.to(tl.float32) * tl.load(TOKEN_SCALES + m, mask=m < M, other=0.0)[None, :]
        y *= tl.load(SCALES + n, mask=n < N, other=0.0)[:, None]
        if BIASED:
            y += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(Y + at, y.to(Y.dtype.element_ty), mask=real)


def block_gemm(
    x: QuantizedTokens, weight: Sequence[Tensor], bias: Tensor | None, plan: BlockPlan, shares: bool = False
) -> Tensor:
    """Return x [T, K] @ codes.T scaled, plus bias, [T, N] in x's dtype; the sum over K is exact.

    The weight lies as in `Layout.INT8_ROWS`. With `shares`, and without bias, it is the sum of each split of
    K, fp32 [S, T, N], rounded once.
    """
    codes, scale, arrivals = weight
    (tokens, k), n = x.codes.shape, codes.shape[0]
    outputs = cdiv(tokens, plan.tokens) * cdiv(n, plan.outputs)
    share, splits = split_evenly(cdiv(k, plan.inputs), plan.splits, outputs, arrivals.shape[0])
    size, dtype = ((splits, tokens, n), torch.float32) if shares else ((tokens, n), x.dtype)
    y = torch.empty(size, dtype=dtype, device=codes.device)
    summed = splits > 1 and not shares
    parts = torch.empty(splits * n * tokens, dtype=torch.int32, device=codes.device) if summed else None
    kernel = variant(
        _int8_gemm, BIASED=bias is not None, BM=plan.tokens, BN=plan.outputs, BK=plan.inputs, PANEL=8,
        SPLITS=splits, SHARES=shares, num_warps=plan.warps, num_stages=plan.stages,
        launch_pdl=overlaps(codes.device),
    )  # fmt: skip
    kernel.launch(
        (outputs, splits), x.codes.contiguous(), x.scale, codes, scale, bias, y, parts, arrivals, tokens, n,
        k, share * plan.inputs,
    )  # fmt: skip
    return y
