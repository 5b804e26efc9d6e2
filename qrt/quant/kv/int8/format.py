"""int8 KV: mid-tread codes (u - 128) * s, s = absmax / 127 per half head, in the rotated basis."""

from __future__ import annotations

from qrt.quant import affine
from qrt.quant.kv.planes import Grid, PlaneFormat


class Int8Format(PlaneFormat):
    """Two planes: a word holds dim j in its low byte and dim j + D/2 in its high byte."""

    name = "int8"
    appends = True
    k = v = Grid(8, 128.0, affine.quantize_midtread8, many="qrt.quant.kv.int8.device:encode_many")


INT8 = Int8Format()
