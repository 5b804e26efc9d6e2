"""int2 KV: codes (n - 1.5) * s per half head, s = absmax / 2, in the rotated basis."""

import torch
from torch import Tensor

from qrt.quant.kv.planes import Grid, PlaneFormat


def quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes uint8 0..3 and scale fp16 [..., D/group]."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1) / 2).clamp(2.0**-24, 65504).half()
    codes = (torch.floor(groups / scale.float()[..., None]) + 2).clamp(0, 3)
    return codes.to(torch.uint8).flatten(-2), scale


class Int2Format(PlaneFormat):
    """Eight planes, four per half head."""

    name = "int2"
    k = v = Grid(2, 1.5, quantize)


INT2 = Int2Format()
