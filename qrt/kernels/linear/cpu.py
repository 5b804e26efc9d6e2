"""`linear` on CPU tensors: torch's packed product, if the scheme laid the weight out for one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.act_mul.ref import act_mul
from qrt.quant.weight import WEIGHT_SCHEMES


def linear(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    """Multiply x [T, K]: [T, N] in x's dtype."""
    return WEIGHT_SCHEMES[scheme].linear_cpu(x, weight, bias)


def linear_act(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str, act: str) -> Tensor:
    """Return act(gate) * up of the product with x [T, K]: [T, N / 2] in x's dtype."""
    return act_mul(linear(x, weight, bias, scheme), act)
