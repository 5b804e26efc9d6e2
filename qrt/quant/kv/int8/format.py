"""int8 KV: mid-tread codes (u - 128) * s, s = absmax / 127 per half head, in the rotated basis."""

from __future__ import annotations

from qrt.quant import affine
from qrt.quant.kv.base import DecodeBlock
from qrt.quant.kv.planes import Grid, PlaneFormat


class Int8Format(PlaneFormat):
    """Two planes: a word holds dim j in its low byte and dim j + D/2 in its high byte."""

    name = "int8"
    bits = 8
    k = v = Grid(8, 128.0, affine.quantize_midtread8)
    decode_blocks = {
        1: DecodeBlock(tokens=128, stages=3, warps=4, registers=255, ahead=True),
        2: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, ahead=True),
        4: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, ahead=True, appends=True),
        17: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, ahead=True),
        48: DecodeBlock(tokens=64, stages=2, warps=2, registers=128),
        192: DecodeBlock(tokens=32, stages=2, warps=1, registers=128),
    }
    pair_blocks = {
        8: decode_blocks | {192: DecodeBlock(tokens=32, stages=2, warps=1, registers=200, heads=2)}
    }


INT8 = Int8Format()
