"""`chain` as a sequence of other operators."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.act_mul import act_mul
from qrt.kernels.linear import linear
from qrt.kernels.rmsnorm import add_rmsnorm
from qrt.quant.digits import Digits


def chain(
    x: Sequence[Tensor],
    residual: Tensor,
    o: Sequence[Tensor],
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    qkv: Sequence[Tensor],
    bias: Tensor | None,
    mlp_norm: Tensor,
    norm: Tensor,
    eps: float,
    scheme: str,
) -> Tensor:
    """See the package's docstring."""
    attended = x[0] if len(x) == 1 else Digits(x[0], x[1], len(residual)).read().to(residual.dtype)
    y = add_rmsnorm(residual, linear(attended, o, None, scheme), mlp_norm, eps)
    y = linear(act_mul(linear(y, gate_up, None, scheme), "silu"), down, None, scheme)
    y = add_rmsnorm(residual, y, norm, eps)
    return linear(y, qkv, bias, scheme) if qkv else y
