"""RMSNorm in one pass: a program holds whole rows in registers (many short ones when K is a head's).

Rows may lie apart in memory in two strides (tokens and heads); results are dense.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ELEMENTS = 2048  # rows shorter than this share a program


@triton.jit(do_not_specialize=["ROWS"])
def _rmsnorm(
    X, RESIDUAL, WEIGHT, Y, ROWS, HEADS, token_stride, head_stride, residual_stride, eps,
    K: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(ROWS, BLOCK_ROWS),): row r is head r % HEADS of token r // HEADS."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_K)
    inside = (row < ROWS)[:, None] & (k < K)[None, :]
    start = row // HEADS * token_stride + row % HEADS * head_stride
    x = tl.load(X + start[:, None] + k[None, :], mask=inside, other=0.0)
    if ADD:
        residual = RESIDUAL + row[:, None] * residual_stride + k[None, :]
        x = (x.to(tl.float32) + tl.load(residual, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual, x, mask=inside)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / K
    normal = (wide * tl.rsqrt(mean + eps)[:, None]).to(x.dtype).to(tl.float32)
    weight = tl.load(WEIGHT + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(Y + row[:, None] * K + k[None, :], (normal * weight[None, :]).to(x.dtype), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x [T, H, K] with dense rows -> dense [T, H, K]; residual [T, K]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (_, heads, k), rows = x.shape, x.shape[0] * x.shape[1]
    if rows == 0:
        return y
    block_k = triton.next_power_of_2(k)
    block_rows = max(1, min(_BLOCK_ELEMENTS // block_k, triton.next_power_of_2(rows)))
    _rmsnorm[(triton.cdiv(rows, block_rows),)](
        x, residual, weight, y, rows, heads, x.stride(0), x.stride(1),
        0 if residual is None else residual.stride(0), eps,
        K=k, ADD=residual is not None, BLOCK_ROWS=block_rows, BLOCK_K=block_k,
        num_warps=min(16, max(1, block_rows * block_k // 512)),
    )  # fmt: skip
    return y


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`qrt::rmsnorm` on CUDA tensors; two leading strides are read in place, others are copied first."""
    dense = x if x.stride(-1) == 1 else x.contiguous()
    rows = dense if x.dim() == 3 else dense.reshape(-1, 1, x.shape[-1])
    return _launch(rows, None, weight, eps).view(x.shape)


def add_rmsnorm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`qrt::add_rmsnorm` on CUDA tensors."""
    return _launch(x.contiguous().unsqueeze(1), residual, weight, eps).squeeze(1)
