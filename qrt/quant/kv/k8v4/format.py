"""k8v4 KV: K on int8's grid, V on int4's. K decides which tokens are attended, so its error costs more."""

from __future__ import annotations

from qrt.quant.kv.base import DecodeBlock
from qrt.quant.kv.int4.format import INT4
from qrt.quant.kv.int8.format import INT8
from qrt.quant.kv.planes import PlaneFormat


class K8V4Format(PlaneFormat):
    """K words of two planes, V words of four."""

    name = "k8v4"
    bits = 6
    k = INT8.k
    v = INT4.v
    decode_blocks = {
        1: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, ahead=True),
        2: DecodeBlock(tokens=64, stages=3, warps=2, registers=128),
    }
    pair_blocks = {
        8: {
            1: decode_blocks[1],
            2: DecodeBlock(tokens=64, stages=3, warps=2, registers=255, heads=2, ahead=True),
            48: DecodeBlock(tokens=64, stages=3, warps=2, registers=200, heads=2),
            192: DecodeBlock(tokens=32, stages=3, warps=1, registers=255, heads=2),
        },
        16: {
            1: decode_blocks[1],
            2: DecodeBlock(tokens=64, stages=3, warps=2, registers=255, heads=2),
            192: decode_blocks[2],
        },
    }


K8V4 = K8V4Format()
