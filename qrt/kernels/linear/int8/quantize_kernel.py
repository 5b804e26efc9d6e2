"""Quantize tokens to int8, each with a scale of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.sizes import cdiv, next_power_of_2
from qrt.quant.device import store_token
from qrt.quant.tokens import QuantizedTokens

WHOLE_ROW = 4096  # so many inputs of a token are one block


@triton.jit
def _quantize_tokens(
    X, CODES, SCALES, K, ASM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Quantize a row a program: its BLOCKS blocks stay in registers until the maximum is known; grid (T,)."""
    after_previous(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    blocks = ()
    for b in tl.static_range(BLOCKS):
        k = b * BLOCK + tl.arange(0, BLOCK)
        blocks = blocks + (tl.load(X + row * K + k, mask=k < K, other=0.0),)
    store_token(blocks, CODES + row * K, SCALES + row, K, BLOCK, ASM)


def quantize_tokens(x: Tensor) -> QuantizedTokens:
    """Quantize x [T, K], contiguous; the same bits as `QuantizedTokens.of` on a CPU."""
    tokens, k = x.shape
    codes = torch.empty(tokens, k, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    wide = k > WHOLE_ROW
    block = max(4, next_power_of_2(k) // (8 if wide else 1))  # in eight, so that little lies beyond the row
    if tokens:
        kernel = variant(
            _quantize_tokens, ASM=COMPILED, BLOCK=block, BLOCKS=cdiv(k, block),
            num_warps=min(16, max(1, block // (256 if wide else 512))), launch_pdl=overlaps(x.device),
        )  # fmt: skip
        kernel.launch((tokens,), x, codes, scale, k)
    return QuantizedTokens(codes, scale, x.dtype)
