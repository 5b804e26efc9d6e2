"""`experts` on CPU tensors: torch's packed products, where the scheme laid the weights out for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qrt.kernels.experts import ref
from qrt.kernels.op import takes
from qrt.quant.weight import WEIGHT_SCHEMES


@takes(ref.experts)
def experts(a: Any) -> Tensor:
    """Return what a token's experts add to it, [T, H] in x's dtype."""
    return ref.summed(experts_partial(*a), a.x.dtype)


@takes(ref.experts_partial)
def experts_partial(a: Any) -> Tensor:
    """Return what each of a token's experts adds to it, fp32 [k, T, H]."""
    linear = WEIGHT_SCHEMES[a.scheme].linear_cpu
    first, second = (a.gate_up, a.gate_up_bias), (a.down, a.down_bias)
    return ref.summands_by(linear, a.x, a.chosen, a.weights, first, second, a.act, a.on_input)
