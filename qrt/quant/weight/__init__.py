"""Weight schemes, one line per scheme; the name is what checkpoints, flags and reports say."""

from qrt.quant.weight.base import WeightData, WeightScheme
from qrt.registry import Registry

WEIGHT_SCHEMES: Registry[WeightScheme] = Registry(
    "weight scheme",
    {
        "fp16": "qrt.quant.weight.fp16.scheme:FP16",
        "w8a16": "qrt.quant.weight.w8a16.scheme:W8A16",
        "w4a16": "qrt.quant.weight.w4a16.scheme:W4A16",
        "w8a8": "qrt.quant.weight.w8a8.scheme:W8A8",
    },
)

WEIGHT_ONLY = {4: "w4a16", 8: "w8a16"}  # by bits

__all__ = ["WEIGHT_ONLY", "WEIGHT_SCHEMES", "WeightData", "WeightScheme"]
