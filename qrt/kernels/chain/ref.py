"""`chain`, operator by operator."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.linear import linear
from qrt.kernels.rmsnorm import add_rmsnorm
from qrt.kernels.silu_mul import silu_mul


def chain(
    x: Tensor,
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
    y = add_rmsnorm(residual, linear(x, o, None, scheme), mlp_norm, eps)
    y = linear(silu_mul(linear(y, gate_up, None, scheme)), down, None, scheme)
    y = add_rmsnorm(residual, y, norm, eps)
    return linear(y, qkv, bias, scheme) if qkv else y
