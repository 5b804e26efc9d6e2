"""Quantize tokens to int8, each with a scale of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import multiprocessors, overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.sizes import cdiv, next_power_of_2
from qrt.quant.device import store_token
from qrt.quant.tokens import QuantizedTokens

WHOLE_ROW = 4096  # so many inputs of a token are one block
WARPS_PER_SM = 64  # of programs, which take rows in turn: the start of one takes longer than a short row


@triton.jit(do_not_specialize=["tokens"])
def _quantize_tokens(
    X, CODES, SCALES, tokens, K, ASM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Quantize rows in turn: the BLOCKS blocks of one stay in registers until its maximum is known."""
    after_previous(launch_pdl)
    for number in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
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
    if not wide and k == 3 * (block // 4):  # in three, so that nothing does
        block //= 4
    warps = min(16, max(1, block // (256 if wide else 512)))
    if tokens:
        kernel = variant(
            _quantize_tokens, ASM=COMPILED, BLOCK=block, BLOCKS=cdiv(k, block), num_warps=warps,
            launch_pdl=overlaps(x.device),
        )  # fmt: skip
        programs = multiprocessors(x.device) * (WARPS_PER_SM // warps)
        kernel.launch((min(tokens, programs),), x, codes, scale, tokens, k)
    return QuantizedTokens(codes, scale, x.dtype)
