"""`silu_mul` and `silu_mul_int8` in torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from qrt.quant import affine


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] of gate_up [T, 2*I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_int8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return `silu_mul` of gate_up [T, 2*I] as codes int8 [T, I] and scale fp32 [T]."""
    codes, scale = affine.quantize_tokens(silu_mul(gate_up))
    return codes, scale.squeeze(-1)
