"""Choose the grid of each group before its weights are rounded: scale and zero point."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.quant.affine import choose_qparams
from qrt.quant.spec import QuantSpec
from qrt_calibrate.rounding.clip import search_clip
from qrt_calibrate.rounding.progressive import search_progressive


def choose_grid(
    weight: Tensor, spec: QuantSpec, dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Choose scales in `dtype` and zero points [..., N, K/G] for `weight` [N, K], or several, [E, N, K].

    With `importance` [K] or [E, K], the cost of a squared error in each column, ranges are searched by it.
    Without it groups keep their extremes. Progressive groups are searched then too, all columns alike.
    """
    if spec.progressive:
        return search_progressive(weight, importance, spec, dtype)
    shrink = 1.0 if importance is None else search_clip(weight, importance, spec, dtype)
    return choose_qparams(weight, spec, dtype, shrink)
