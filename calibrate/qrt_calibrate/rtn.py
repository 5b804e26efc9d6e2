"""Round to nearest: needs no calibration text, only the weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qrt.quant.affine import choose_qparams, quantize
from qrt.quant.spec import QuantSpec
from qrt.quant.weight import WeightData
from qrt_calibrate.method import LayerResult, Method


def round_weight(
    weight: Tensor, spec: QuantSpec, dtype: torch.dtype, shrink: float | Tensor = 1.0
) -> WeightData:
    """`weight` [N, K] on the grid of `spec`, with scales in `dtype`; `shrink` as in `choose_qparams`."""
    scale, zero = choose_qparams(weight, spec, dtype, shrink)
    return WeightData(quantize(weight, scale, zero, spec), scale, zero, bits=spec.bits)


def with_bias(data: WeightData, bias: Tensor | None) -> WeightData:
    """`data` on the CPU, with its bias, ready for the writer."""
    assert data.scale is not None
    zero = None if data.zero is None else data.zero.cpu()
    return WeightData(data.values.cpu(), data.scale.cpu(), zero, bias=bias, bits=data.bits)


class RoundToNearest(Method):
    """Every weight on its own; the report shows the relative error of the layer's weights."""

    def quantize(self, index: int, tensors: Mapping[str, Tensor]) -> LayerResult:
        rest = dict(tensors)
        linears = {}
        error = size = 0.0
        for name in self.job.projections(index):
            weight = rest.pop(f"{name}.weight")
            exact = weight.to(self.job.device, torch.float32)
            data = round_weight(exact, self.job.recipe.spec, self.job.scale_dtype)
            error += float((data.dequantize() - exact).square().sum())
            size += float(exact.square().sum())
            linears[name] = with_bias(data, rest.pop(f"{name}.bias", None))
        return LayerResult(linears, rest, {"weight error": (error / size) ** 0.5 if size else 0.0})
