"""Round weights to nearest, take stacks of them apart, and prepare them for the writer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qrt.quant.affine import quantize
from qrt.quant.spec import QuantSpec
from qrt.quant.weight import WeightData
from qrt_calibrate.rounding.grid import choose_grid


def round_weight(
    weight: Tensor, spec: QuantSpec, dtype: torch.dtype, importance: Tensor | None = None
) -> WeightData:
    """Round `weight` [N, K] to nearest on the grid that `choose_grid` chooses."""
    scale, zero = choose_grid(weight, spec, dtype, importance)
    return WeightData(quantize(weight, scale, zero, spec), scale, zero, bits=spec.bits)


def split(data: WeightData, rows: list[int]) -> list[WeightData]:
    """Take a stack of weights apart, into parts of `rows` output features."""
    assert data.scale is not None
    zeros = [None] * len(rows) if data.zero is None else data.zero.split(rows)
    return [
        WeightData(values, scale, zero, bits=data.bits)
        for values, scale, zero in zip(data.values.split(rows), data.scale.split(rows), zeros, strict=True)
    ]


def for_writer(data: WeightData, bias: Tensor | None) -> WeightData:
    """Return `data` on the CPU, with its bias."""
    assert data.scale is not None
    zero = None if data.zero is None else data.zero.cpu()
    return WeightData(data.values.cpu(), data.scale.cpu(), zero, bias=bias, bits=data.bits)


def on_device(data: WeightData, device: torch.device) -> WeightData:
    """Return `data` with what decodes it on `device`."""
    assert data.scale is not None
    zero = None if data.zero is None else data.zero.to(device)
    return replace(data, values=data.values.to(device), scale=data.scale.to(device), zero=zero)
