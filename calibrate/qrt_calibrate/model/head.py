"""The quantized head: rounded to nearest, and what it predicts.

It is handled in blocks of rows: whole and in fp32 it would outweigh a layer.
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

HEAD_ROWS = 16384  # of the head that are rounded or multiplied at a time


def round_head(weight: Tensor, grid: Grid, dtype: torch.dtype, device: torch.device) -> WeightData:
    """`weight` [V, H] on `grid`, scales in `dtype`: computed on `device`, on the CPU at the end."""
    parts = (rows.to(device, torch.float32) for rows in weight.split(HEAD_ROWS))
    return fuse([for_writer(round_weight(part, grid.spec, dtype), None) for part in parts])


class PlainHead:
    """A head that is not quantized, `weight` [V, H] where it runs."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states fp32 [T, H] -> fp32 [T, V]."""
        parts = self.weight.split(HEAD_ROWS)
        return torch.cat([nn.functional.linear(hidden, rows.float()) for rows in parts], -1)


class RoundedHead:
    """A head as it is stored, on `device`."""

    def __init__(self, weight: WeightData, grid: Grid, device: torch.device) -> None:
        assert weight.scale is not None and weight.zero is None
        self._weight = replace(weight, values=weight.values.to(device), scale=weight.scale.to(device))
        self._int8_tokens = WEIGHT_SCHEMES[grid.scheme].int8_tokens

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states fp32 [T, H] -> fp32 [T, V]; tokens are rounded where the scheme does so."""
        if self._int8_tokens:
            hidden = QuantizedTokens.of(hidden).dequantize()
        sizes = [len(part) for part in self._weight.values.split(HEAD_ROWS)]
        parts = split(self._weight, sizes)
        return torch.cat([nn.functional.linear(hidden, part.dequantize()) for part in parts], -1)


AnyHead = PlainHead | RoundedHead
