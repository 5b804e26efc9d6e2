"""The AWQ scale search: a grid of channel scales, each judged by the block that reads them, truly rounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.quant.spec import QuantSpec
from qrt_calibrate.fold import Pair
from qrt_calibrate.observe import Call
from qrt_calibrate.rtn import round_weight

GRID = 20  # candidates of one search, the identity among them


@dataclass(frozen=True)
class Found:
    """Scales per source channel, and the mean squared output error of rounding without and with them."""

    scales: Tensor
    rtn_loss: float
    loss: float


def search_scales(pair: Pair, call: Call, mean_abs: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Found:
    """The candidate whose rounded readers change the recorded `call` least; identity unless one is better.

    mean_abs   [K] fp32, E|x| of the readers' input
    dtype      of the stored scales; candidates whose fold it cannot hold exactly are not tried
    """
    weights = [reader.weight.clone() for reader in pair.readers]
    found: Found | None = None
    for scales in candidates(pair, mean_abs, spec):
        if not pair.is_exact(scales, dtype):
            continue
        columns = pair.spread(scales)
        for reader, weight in zip(pair.readers, weights, strict=True):
            reader.weight.copy_(round_weight(weight * columns, spec, dtype).dequantize() / columns)
        loss = call.loss()
        if found is None:
            found = Found(scales, rtn_loss=loss, loss=loss)
        elif loss < found.loss:
            found = Found(scales, found.rtn_loss, loss)
    for reader, weight in zip(pair.readers, weights, strict=True):
        reader.weight.copy_(weight)
    assert found is not None, "the identity is always exact"
    return found


def candidates(pair: Pair, mean_abs: Tensor, spec: QuantSpec) -> Iterator[Tensor]:
    """Scales per source channel: the identity, then x^r / w^(1-r) for r from 0 to 1, without repeats.

    x is the channel's mean magnitude in the input, w in the weights relative to their group's largest. Scales
    are centred, sqrt(max * min) = 1, and rounded to powers of two; a channel never seen active keeps 1.
    """
    x = pair.tie(mean_abs)
    w = pair.tie(_relative_magnitude(pair, spec))
    active = x > 0
    last = torch.ones_like(x)
    yield last
    if not active.any():
        return
    for step in range(GRID - 1):
        ratio = step / (GRID - 2)
        log = ratio * x[active].log2() - (1 - ratio) * (w[active] + 1e-4).log2()
        scales = torch.ones_like(x)
        scales[active] = torch.exp2(torch.round(log - (log.max() + log.min()) / 2))
        if not torch.equal(scales, last):
            yield scales
        last = scales


def _relative_magnitude(pair: Pair, spec: QuantSpec) -> Tensor:
    """[K]: mean over the readers' rows of |w| / the largest |w| of its group."""
    weight = torch.cat([reader.weight for reader in pair.readers]).abs()
    groups = weight.unflatten(1, (-1, spec.group_of(weight.shape[1])))
    return (groups / (groups.amax(-1, keepdim=True) + 1e-6)).flatten(1).mean(0)
