"""Linear: a weight in the run-time layout of its scheme, and the one operator that multiplies by it."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.linear import (
    linear,
    linear_int8,
    linear_int8_shares,
    linear_shares,
    linear_silu,
    linear_silu_int8,
    prepare,
)
from qrt.kernels.linear.weight import Weight
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData

SHARED_TOKENS = 64  # most whose product is summed by the norm behind it: K is split where tokens are few


class Linear:
    """y = x @ W.T + bias with W [N, K] held as `scheme` keeps it.

    scheme    a name in WEIGHT_SCHEMES
    tensors   the scheme's run-time tensors, in its order
    bias      [N] in the model dtype, or None

    int8_tokens says whether it quantizes its input per token, so that QuantizedTokens save it a kernel.
    """

    def __init__(self, scheme: str, tensors: tuple[Tensor, ...], bias: Tensor | None = None) -> None:
        self.scheme = scheme
        self.tensors = Weight(tensors)
        self.bias = bias
        self.int8_tokens = WEIGHT_SCHEMES[scheme].int8_tokens

    @classmethod
    def pack(cls, scheme: str, weight: WeightData, device: torch.device, dtype: torch.dtype) -> Linear:
        """Lay a canonical weight out for the kernels of `scheme`; raises as `WeightScheme.prepare` does."""
        bias = None if weight.bias is None else weight.bias.to(device, dtype)
        return cls(scheme, prepare(scheme, weight, device, dtype), bias)

    def __call__(self, x: Tensor | QuantizedTokens) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype; QuantizedTokens only where `int8_tokens`."""
        if isinstance(x, Tensor):
            return linear(x, self.tensors, self.bias, self.scheme)
        return linear_int8(x.codes, x.scale, self.tensors, self.bias, self.scheme, x.dtype)

    def shares(self, x: Tensor | QuantizedTokens) -> Tensor:
        """A call for a norm that adds what it gives: of few tokens on a GPU fp32 [S, T, N], to be summed."""
        tokens = x.codes if isinstance(x, QuantizedTokens) else x
        splits = self.int8_tokens and self.bias is None and tokens.is_cuda and len(tokens) <= SHARED_TOKENS
        if not splits:
            return self(x)
        if isinstance(x, QuantizedTokens):
            return linear_int8_shares(x.codes, x.scale, self.tensors, self.scheme)
        return linear_shares(x, self.tensors, self.scheme)

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu(gate) * up of x [T, K], each half of the outputs: [T, N / 2] in x's dtype."""
        return linear_silu(x, self.tensors, self.bias, self.scheme)

    def silu_mul_int8(self, x: QuantizedTokens) -> QuantizedTokens:
        """The same, quantized before and after; with `int8_tokens` only."""
        codes, scale = linear_silu_int8(x.codes, x.scale, self.tensors, self.bias, self.scheme, x.dtype)
        return QuantizedTokens(codes, scale, x.dtype)

    def parameters(self) -> list[Tensor]:
        """Every tensor it holds."""
        return self.tensors if self.bias is None else [*self.tensors, self.bias]
