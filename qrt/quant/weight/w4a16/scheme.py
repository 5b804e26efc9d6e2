"""4-bit weights: codes of one group share a scale and, when asymmetric, a zero point."""

from __future__ import annotations

from typing import Any, ClassVar

from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight.tiles import TiledScheme
from qrt.quant.weight.w4a16.packed import PackedInt4


class W4A16Scheme(TiledScheme):
    """Groups of a multiple of 32 inputs, or one group per output channel.

    Run-time tensors: a `TiledWeight`, or on a CPU a `PackedInt4`.
    """

    name = "w4a16"
    spec = QuantSpec(4, symmetric=False, granularity=Granularity.GROUP, group_size=128)
    stored, head, method = "pack-quantized", "w8a16", "awq-yaqa"
    packed: ClassVar[Any] = PackedInt4

    def unpacker(self) -> Any:
        from qrt.quant.weight.w4a16.device import unpack

        return unpack

    def raw(self) -> tuple[Any, tuple[float, float]]:
        from qrt.quant.weight.w4a16.device import RAW_OFFSET, raw

        return raw, (RAW_OFFSET, 1.0)


W4A16 = W4A16Scheme()
