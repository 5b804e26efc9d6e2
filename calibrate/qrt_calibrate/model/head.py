"""The head, plain or rounded to nearest, and its logits.

Rows are handled in blocks, because the whole head in fp32 takes more memory than a layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.quant.weight.base import fuse
from qrt_calibrate.recipe.recipe import Grid
from qrt_calibrate.rounding.rtn import for_writer, round_weight, split

HEAD_ROWS = 16384  # rows that are rounded or multiplied at a time


def round_head(weight: Tensor, grid: Grid, dtype: torch.dtype, device: torch.device) -> WeightData:
    """Round `weight` [V, H] to `grid` on `device`, with scales in `dtype`; the result is on the CPU."""
    parts = (rows.to(device, torch.float32) for rows in weight.split(HEAD_ROWS))
    return fuse([for_writer(round_weight(part, grid.spec, dtype), None) for part in parts])


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

    def __init__(self, weight: WeightData, grid: Grid, device: torch.device) -> None:
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
