"""The product of W8A8: per-token int8 activations, int8 tensor cores, scales and bias in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.linear.hopper_int8_kernel import (
    INPUTS,
    HopperPlan,
    hopper_int8_product,
)
from qrt.kernels.linear.shared.order_kernel import in_panels
from qrt.kernels.linear.shared.split_kernel import split_evenly, sum_splits
from qrt.kernels.linear.weight import Prepared
from qrt.kernels.sizes import cdiv, next_power_of_2
from qrt.quant.device import store_token
from qrt.quant.tokens import QuantizedTokens

WHOLE_ROW = 4096  # inputs of a token that are one block


@triton.jit
def _quantize_tokens(
    X, CODES, SCALES, K, ASM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (T,): a row stays in registers as it came, BLOCKS blocks of it, until its maximum is known."""
    after_previous(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    blocks = ()
    for b in tl.static_range(BLOCKS):
        k = b * BLOCK + tl.arange(0, BLOCK)
        blocks = blocks + (tl.load(X + row * K + k, mask=k < K, other=0.0),)
    store_token(blocks, CODES + row * K, SCALES + row, K, BLOCK, ASM)


@triton.jit(do_not_specialize=["M"])
def _int8_gemm(
    A, TOKEN_SCALES, B, SCALES, BIAS, Y, PARTS, ARRIVALS, M, N, K, share,
    BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PANEL: tl.constexpr,
    SPLITS: tl.constexpr, SHARES: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(M, BM) * cdiv(N, BN), SPLITS), `share` of K a split, in whole blocks. SHARES: Y
    [SPLITS, M, N], what each split has of it.

    Y.T = B [N, K] @ A [M, K].T, so that few tokens waste little MMA.
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
    if launch_pdl:  # not earlier: the next kernel's programs would take the places of this one's
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


def quantize_tokens(x: Tensor) -> QuantizedTokens:
    """x [T, K] contiguous; equals `QuantizedTokens.of` on a CPU."""
    tokens, k = x.shape
    codes = torch.empty(tokens, k, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    wide = k > WHOLE_ROW
    block = max(4, next_power_of_2(k) // (8 if wide else 1))  # in eight: little lies beyond the row
    if tokens:
        kernel = variant(
            _quantize_tokens, ASM=COMPILED, BLOCK=block, BLOCKS=cdiv(k, block),
            num_warps=min(16, max(1, block // (256 if wide else 512))), launch_pdl=overlaps(x.device),
        )  # fmt: skip
        kernel.launch((tokens,), x, codes, scale, k)
    return QuantizedTokens(codes, scale, x.dtype)


class BlockPlan(NamedTuple):
    """Tokens, outputs and inputs of a program's block, and how it is compiled."""

    tokens: int
    outputs: int
    inputs: int
    splits: int
    warps: int
    stages: int


def width_of(tokens: int) -> int:
    """Token counts that share a plan, by the largest of them: powers of two, all up to 16 and all above 1024
    alike."""
    return min(max(16, next_power_of_2(tokens)), 2048)


@lru_cache(maxsize=1 << 10)
def tuning_key(k: int, n: int, width: int) -> str:
    """Of a plan in `qrt.kernels.tuned`."""
    return f"int8 {k}x{n} {width} wide"


PLANS: dict[str, Any] = {"block": BlockPlan, "hopper": HopperPlan}  # by their names there


def block_plan(width: int) -> BlockPlan:
    """Where nothing was measured."""
    if width <= 64:  # bound by weight bytes: narrow blocks, so that every SM reads
        return BlockPlan(width, 32, 256, 1, 4, 4)
    return BlockPlan(128, 128, 128, 1, 8, 3)


def hopper_product(
    x: QuantizedTokens, weight: Sequence[Tensor], bias: Tensor | None, plan: HopperPlan, gated: bool,
    shares: bool = False,
) -> Prepared:  # fmt: skip
    """Return the product of bias and all that are as x with codes int8 [N, K], scale fp32 [N] and arrivals
    int32 [N], by Hopper's kernel: [T, N], if gated silu(gate) * up of it, [T, N / 2], or with `shares` fp32
    [S, T, N]."""
    codes, scale, arrivals = weight
    (tokens, k), n = x.codes.shape, codes.shape[0]
    multiply = hopper_int8_product(x, codes, scale, arrivals, bias, plan, 2 if gated else 1, shares)
    size: tuple[int, ...] = (tokens, n // 2 if gated else n)
    if shares:
        _, splits = _splits(plan, INPUTS, tokens, n, k, arrivals)
        size = splits, tokens, n

    def product(x: QuantizedTokens, bias: Tensor | None) -> Tensor:
        y = torch.empty(size, dtype=torch.float32 if shares else x.dtype, device=x.codes.device)
        multiply(x, bias, y)
        return y

    return product


def _splits(
    plan: BlockPlan | HopperPlan, inputs: int, tokens: int, n: int, k: int, arrivals: Tensor
) -> tuple[int, int]:
    """Return the steps of `inputs` that a split takes, and how many splits there are."""
    outputs = cdiv(tokens, plan.tokens) * cdiv(n, plan.outputs)
    return split_evenly(cdiv(k, inputs), plan.splits, outputs, arrivals.shape[0])


def block_gemm(
    x: QuantizedTokens, weight: Sequence[Tensor], bias: Tensor | None, plan: BlockPlan, shares: bool = False
) -> Tensor:
    """x [T, K] -> [T, N] in x's dtype by the kernel of any GPU; weight as `hopper_product`'s. The sum over K
    is exact. With `shares` and without bias fp32 [S, T, N], what each of S splits of K has of it, rounded
    once."""
    codes, scale, arrivals = weight
    (tokens, k), n = x.codes.shape, codes.shape[0]
    outputs = cdiv(tokens, plan.tokens) * cdiv(n, plan.outputs)
    share, splits = _splits(plan, plan.inputs, tokens, n, k, arrivals)
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
