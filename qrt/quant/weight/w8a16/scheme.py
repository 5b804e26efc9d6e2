"""8-bit weights: codes of one group share a scale and, when asymmetric, a zero point."""

from __future__ import annotations

from typing import Any

from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight.tiles import BF16_UNIT, TiledScheme
from qrt.quant.weight.w8a16.packed import PackedInt8


class W8A16Scheme(TiledScheme):
    """Groups of a multiple of 32 inputs, or one group per output channel.

    Run-time tensors: a `TiledWeight`, or on a CPU a `PackedInt8`.
    """

    name = "w8a16"
    spec = QuantSpec(8, symmetric=True, granularity=Granularity.GROUP, group_size=128)
    stored, head, method = "pack-quantized", "w8a16", "awq-gptq"
    packed = PackedInt8

    def unpacker(self) -> Any:
        from qrt.quant.weight.w8a16.device import unpack

        return unpack

    def raw(self) -> tuple[Any, tuple[float, float]]:
        return self.unpacker(), (0.0, 1 / BF16_UNIT)


W8A16 = W8A16Scheme()
