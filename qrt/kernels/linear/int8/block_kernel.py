"""Multiply int8 codes by int8 codes on any GPU: int8 tensor cores, scales and bias in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.linear.int8.plans import BlockPlan
from qrt.kernels.linear.shared.device import split_evenly
from qrt.kernels.linear.shared.rows_kernel import multiply_rows
from qrt.kernels.sizes import cdiv
from qrt.quant.tokens import QuantizedTokens


def block_gemm(
    x: QuantizedTokens,
    weight: Sequence[Tensor],
    bias: Tensor | None,
    plan: BlockPlan,
    partial_sums: bool = False,
) -> Tensor:
    """Return x [T, K] @ codes.T scaled, plus bias, [T, N] in x's dtype; the sum over K is exact.

    The weight lies as in `Layout.INT8_ROWS`. With `partial_sums`, and without bias, it is the sum of each
    split of K, fp32 [S, T, N], rounded once.
    """
    codes, scale, arrivals = weight
    (tokens, k), n = x.codes.shape, codes.shape[0]
    outputs = cdiv(tokens, plan.tokens) * cdiv(n, plan.outputs)
    share, splits = split_evenly(cdiv(k, plan.inputs), plan.splits, outputs, arrivals.shape[0])
    size, dtype = ((splits, tokens, n), torch.float32) if partial_sums else ((tokens, n), x.dtype)
    y = torch.empty(size, dtype=dtype, device=codes.device)
    summed = splits > 1 and not partial_sums
    parts = torch.empty(splits * n * tokens, dtype=torch.int32, device=codes.device) if summed else None
    kernel = variant(
        multiply_rows, BIASED=bias is not None, DOT=tl.int8, BM=plan.tokens, BN=plan.outputs, BK=plan.inputs,
        PANEL=8, SPLITS=splits, SHARED=partial_sums, ACT=None, ASM=COMPILED, READS=0, SHARES=0,
        num_warps=plan.warps, num_stages=plan.stages, launch_pdl=overlaps(codes.device),
    )  # fmt: skip
    kernel.launch(
        (outputs, splits), x.codes.contiguous(), x.scale, codes, scale, bias, y, parts, arrivals, None,
        None, None, tokens, n, k, share * plan.inputs,
    )  # fmt: skip
    return y
