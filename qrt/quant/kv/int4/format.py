"""int4 KV: mid-rise codes (n - 7.5) * s per half head, absmax 7 to 8 steps s, in the rotated basis."""

from __future__ import annotations

from qrt.quant import affine
from qrt.quant.kv.base import DecodeBlock
from qrt.quant.kv.planes import Grid, PlaneFormat


class Int4Format(PlaneFormat):
    """Four planes, two per half head; sixteen levels around zero without a zero point."""

    name = "int4"
    bits = 4
    k = v = Grid(4, 7.5, affine.quantize_midrise4)
    decode_blocks = {
        1: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, ahead=True),
        2: DecodeBlock(tokens=64, stages=3, warps=2, registers=128),
        192: DecodeBlock(tokens=32, stages=2, warps=1, registers=128),
    }
    pair_blocks = {
        8: {
            1: decode_blocks[1],
            2: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, heads=2, ahead=True),
            48: DecodeBlock(tokens=64, stages=5, warps=2, registers=200, heads=2),
            192: DecodeBlock(tokens=32, stages=5, warps=1, registers=255, heads=2),
        },
        16: decode_blocks | {2: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, heads=2)},
    }


INT4 = Int4Format()
