"""The head, plain or rounded to nearest, and its logits.

Rows are handled in blocks, because the whole head in fp32 takes more memory than a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.quant.weight.base import fuse
from qrt_calibrate.recipe.recipe import LinearRecipe
from qrt_calibrate.rounding.rtn import for_writer, round_weight, split

HEAD_ROWS = 16384  # rows that are rounded or multiplied at a time


def round_head(weight: Tensor, grid: LinearRecipe, dtype: torch.dtype, device: torch.device) -> WeightData:
    """Round `weight` [V, H] to `grid` on `device`, with scales in `dtype`; the result is on the CPU."""
    parts = (rows.to(device, torch.float32) for rows in weight.split(HEAD_ROWS))
    return fuse([for_writer(round_weight(part, grid.spec, dtype), None) for part in parts])


def unit_rows(weight: Tensor) -> Tensor:
    """Return a head's weight [V, H] with rows of length 1."""
    parts = weight.split(HEAD_ROWS)
    return torch.cat([nn.functional.normalize(rows.float()).to(weight.dtype) for rows in parts])


@dataclass(frozen=True)
class Finish:
    """What a model does to its head's products x: c * tanh(scale * (x + bias) / c); c is the cap, if any.

    bias is [V] or None.
    """

    scale: float = 1.0
    cap: float | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [T, V] of products x [T, V]."""
        x = x if self.bias is None else x + self.bias.float()
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.cap is None else self.cap * torch.tanh(x / self.cap)

    def backward(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient at the products, given that at their `logits`."""
        if self.cap is not None:
            gradient = gradient * (1 - (logits / self.cap).square())
        return gradient * self.scale


class PlainHead:
    """A head that is not quantized; `weight` [V, H] is on the device that computes."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits fp32 [T, V] of normed hidden states fp32 [T, H]."""
        parts = self.weight.split(HEAD_ROWS)
        return torch.cat([nn.functional.linear(hidden, rows.float()) for rows in parts], -1)


class RoundedHead:
    """A head as it is stored, on `device`."""

    def __init__(self, weight: WeightData, grid: LinearRecipe, device: torch.device) -> None:
        assert weight.scale is not None and weight.zero is None
        self._weight = replace(weight, values=weight.values.to(device), scale=weight.scale.to(device))
        self._int8_tokens = WEIGHT_SCHEMES[grid.scheme].int8_tokens

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits fp32 [T, V] of normed hidden states fp32 [T, H], rounded if the scheme does so."""
        if self._int8_tokens:
            hidden = QuantizedTokens.of(hidden).dequantize()
        sizes = [len(part) for part in self._weight.values.split(HEAD_ROWS)]
        parts = split(self._weight, sizes)
        return torch.cat([nn.functional.linear(hidden, part.dequantize()) for part in parts], -1)


AnyHead = PlainHead | RoundedHead
