"""The operators of `qrt.kernels.experts` in torch: each expert multiplies the tokens that chose it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qrt.kernels.act_mul.ref import act_mul
from qrt.quant.weight import WEIGHT_SCHEMES

Linear = Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor]
Stacked = tuple[Sequence[Tensor], Tensor | None]  # of all experts: run-time tensors and bias


def summed(partial_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of partial sums fp32 [k, T, H] in the order of k, rounded once."""
    total = partial_sums[0]
    for share in partial_sums[1:]:
        total = total + share
    return total.to(dtype)


def summands_by(
    linear: Linear, x: Tensor, chosen: Tensor, weights: Tensor, first: Stacked, second: Stacked, act: str,
    on_input: bool,
) -> Tensor:  # fmt: skip
    """Return what each expert adds to each token, fp32 [k, T, H]; `linear` multiplies."""
    partial_sums = x.new_empty(chosen.shape[1], *x.shape, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        weight, read = weights[token, place, None], x[token]
        if on_input:
            read = (read.float() * weight).to(x.dtype)
        inner = act_mul(linear(read, *_of(first, expert)), act)
        y = linear(inner, *_of(second, expert)).float()
        partial_sums[place, token] = y if on_input else y * weight
    return partial_sums


def _of(stacked: Stacked, expert: int) -> tuple[list[Tensor], Tensor | None]:
    tensors, bias = stacked
    return [tensor[expert] for tensor in tensors], None if bias is None else bias[expert]


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor],
    gate_up_bias: Tensor | None,
    down: Sequence[Tensor],
    down_bias: Tensor | None,
    scheme: str,
    act: str,
    on_input: bool,
) -> Tensor:
    """Return what a token's experts add to it, [T, H] in x's dtype."""
    partial_sums = experts_partial(
        x, chosen, weights, gate_up, gate_up_bias, down, down_bias, scheme, act, on_input
    )
    return summed(partial_sums, x.dtype)


def experts_partial(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor],
    gate_up_bias: Tensor | None,
    down: Sequence[Tensor],
    down_bias: Tensor | None,
    scheme: str,
    act: str,
    on_input: bool,
) -> Tensor:
    """Return what each of a token's experts adds to it, fp32 [k, T, H]."""
    linear = WEIGHT_SCHEMES[scheme].linear_ref
    first, second = (gate_up, gate_up_bias), (down, down_bias)
    return summands_by(linear, x, chosen, weights, first, second, act, on_input)
