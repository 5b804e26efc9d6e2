"""int4 KV: mid-rise codes (n - 7.5) * s per half head, absmax 7 to 8 steps s, in the rotated basis."""

from __future__ import annotations

from qrt.quant import affine
from qrt.quant.kv.planes import Grid, PlaneFormat


class Int4Format(PlaneFormat):
    """Four planes, two per half head; sixteen levels around zero, without a zero point."""

    name = "int4"
    k = v = Grid(4, 7.5, affine.quantize_midrise4, many="qrt.quant.kv.int4.many.device:encode")


INT4 = Int4Format()
