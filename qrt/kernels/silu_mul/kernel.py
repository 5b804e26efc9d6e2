"""silu(gate) * up, elementwise: one program per token and block of outputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_mul(GATE_UP, Y, I, BLOCK: tl.constexpr):
    """Grid (T, cdiv(I, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE_UP + row * 2 * I + i, mask=i < I, other=0.0)
    up = tl.load(GATE_UP + row * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(Y + row * I + i, (silu * up).to(gate.dtype), mask=i < I)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`qrt::silu_mul` on CUDA tensors."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _silu_mul[(tokens, triton.cdiv(width, _BLOCK))](gate_up.contiguous(), y, width, _BLOCK)
    return y
