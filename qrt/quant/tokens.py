"""Activations as int8 codes, for readers that are all int8 products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qrt.quant import affine


class QuantizedTokens(NamedTuple):
    """Activations x [T, K] rounded token by token: x ~ codes * scale (`affine.quantize_tokens`).

    codes    int8 [T, K]
    scale    fp32 [T]
    dtype    dtype of x and of products with it
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> QuantizedTokens:
        """Quantize x [T, K] with torch."""
        codes, scale = affine.quantize_tokens(x)
        return cls(codes, scale.squeeze(-1), x.dtype)

    def dequantize(self) -> Tensor:
        """Return the activations that a product with them sees: fp32 [T, K]."""
        return self.codes.float() * self.scale[..., None]
