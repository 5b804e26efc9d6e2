"""`act_mul` and `act_mul_int8` in torch."""

from __future__ import annotations

from torch import Tensor

from qrt.definitions.activations import ACTIVATIONS, act_times
from qrt.quant import affine


def act_mul(x: Tensor, act: str, gated: bool = True) -> Tensor:
    """Return act(gate) * up [T, I] of x [T, 2*I], or if not gated act(x) of x [T, I]."""
    if not gated:
        return ACTIVATIONS[act](x)
    gate, up = x.chunk(2, dim=-1)
    return act_times(gate, up, act)


def act_mul_int8(x: Tensor, act: str, gated: bool = True) -> tuple[Tensor, Tensor]:
    """Return `act_mul` of x as codes int8 [T, I] and scale fp32 [T]."""
    codes, scale = affine.quantize_tokens(act_mul(x, act, gated))
    return codes, scale.squeeze(-1)
