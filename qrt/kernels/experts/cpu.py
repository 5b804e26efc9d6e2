"""`experts` on CPU tensors: torch's packed products, where the scheme laid the weights out for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.experts.ref import shares_by, summed
from qrt.quant.weight import WEIGHT_SCHEMES


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Sequence[Tensor], gate_up_bias: Tensor | None,
    down: Sequence[Tensor], down_bias: Tensor | None, scheme: str, act: str, on_input: bool,
) -> Tensor:  # fmt: skip
    """Return what a token's experts add to it, [T, H] in x's dtype."""
    shares = experts_partial(
        x, chosen, weights, gate_up, gate_up_bias, down, down_bias, scheme, act, on_input
    )
    return summed(shares, x.dtype)


def experts_partial(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Sequence[Tensor], gate_up_bias: Tensor | None,
    down: Sequence[Tensor], down_bias: Tensor | None, scheme: str, act: str, on_input: bool,
) -> Tensor:  # fmt: skip
    """Return what each of a token's experts adds to it, fp32 [k, T, H]."""
    linear = WEIGHT_SCHEMES[scheme].linear_cpu
    return shares_by(linear, x, chosen, weights, gate_up, gate_up_bias, down, down_bias, act, on_input)
