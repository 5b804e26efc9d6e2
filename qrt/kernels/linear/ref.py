"""The operators of `qrt.kernels.linear` in torch. Every scheme defines its own product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.kernels.act_mul.ref import act_mul, act_mul_int8
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES


def linear(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    """Multiply x [T, K]: [T, N] in x's dtype."""
    return WEIGHT_SCHEMES[scheme].linear_ref(x, weight, bias)


def linear_int8(
    codes: Tensor,
    token_scale: Tensor,
    weight: Sequence[Tensor],
    bias: Tensor | None,
    scheme: str,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply codes int8 [T, K] with token_scale fp32 [T]: [T, N] in `dtype`."""
    tokens = QuantizedTokens(codes, token_scale, dtype)
    return WEIGHT_SCHEMES[scheme].linear_int8_ref(tokens, weight, bias)


def linear_partial(x: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    """Multiply x [T, K]: fp32 [1, T, N], as nothing is split."""
    codes, scale, _ = QuantizedTokens.of(x)
    return linear_int8_partial(codes, scale, weight, scheme)


def linear_int8_partial(codes: Tensor, token_scale: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    """Multiply codes int8 [T, K] with token_scale fp32 [T]: fp32 [1, T, N]."""
    return linear_int8(codes, token_scale, weight, None, scheme, torch.float32)[None]


def linear_act(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str, act: str) -> Tensor:
    """Return act(gate) * up of the product with x [T, K]: [T, N / 2] in x's dtype."""
    return act_mul(linear(x, weight, bias, scheme), act)


def linear_act_int8(
    codes: Tensor,
    token_scale: Tensor,
    weight: Sequence[Tensor],
    bias: Tensor | None,
    scheme: str,
    dtype: torch.dtype,
    act: str,
) -> tuple[Tensor, Tensor]:
    """Return act(gate) * up of `linear_int8`, quantized: codes int8 [T, N / 2], scale fp32 [T]."""
    return act_mul_int8(linear_int8(codes, token_scale, weight, bias, scheme, dtype), act)
