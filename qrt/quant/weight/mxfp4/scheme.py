"""MXFP4 weights: 4-bit floats (e2m1), 32 of which share a power of two. They are read, never made."""

from __future__ import annotations

from typing import Any

from qrt.quant import e2m1
from qrt.quant.spec import Codes, Granularity, QuantSpec
from qrt.quant.weight.mxfp4.packed import PackedMXFP4
from qrt.quant.weight.tiles import TiledScheme


class MXFP4Scheme(TiledScheme):
    """Groups of 32 inputs, scales in bf16, or in fp32 where one is large.

    Run-time tensors: a `TiledWeight`, or on a CPU a `PackedMXFP4`.
    """

    name = "mxfp4"
    spec = QuantSpec(
        4, symmetric=True, granularity=Granularity.GROUP, group_size=e2m1.GROUP, codes=Codes.E2M1
    )
    head, method = "w8a16", None
    packed = PackedMXFP4

    def unpacker(self) -> Any:
        from qrt.quant.weight.mxfp4.device import unpack

        return unpack


MXFP4 = MXFP4Scheme()
