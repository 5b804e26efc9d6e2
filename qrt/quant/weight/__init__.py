"""Weight schemes, one line per scheme; the name is what checkpoints, flags and reports say."""

from qrt.quant.spec import Codes, QuantSpec
from qrt.quant.weight.base import WeightData, WeightScheme
from qrt.registry import Registry

WEIGHT_SCHEMES: Registry[WeightScheme] = Registry(
    "weight scheme",
    {
        "fp16": "qrt.quant.weight.fp16.scheme:FP16",
        "w8a16": "qrt.quant.weight.w8a16.scheme:W8A16",
        "w4a16": "qrt.quant.weight.w4a16.scheme:W4A16",
        "w8a8": "qrt.quant.weight.w8a8.scheme:W8A8",
        "w4a8": "qrt.quant.weight.w4a8.scheme:W4A8",
        "mxfp4": "qrt.quant.weight.mxfp4.scheme:MXFP4",
    },
)


def quantized() -> dict[str, QuantSpec]:
    """Return the schemes of integers, which weights are rounded to, with their default grids."""
    grids = {name: WEIGHT_SCHEMES[name].spec for name in WEIGHT_SCHEMES}
    return {name: spec for name, spec in grids.items() if spec is not None and spec.codes is Codes.INTEGERS}


def weight_only() -> dict[int, str]:
    """Return the schemes that round only weights, to integers, by bits; of two with as many, the first."""
    return by_bits(int8_tokens=False)


def by_bits(int8_tokens: bool) -> dict[int, str]:
    """Return the schemes of integers that round tokens to int8 too, or do not, as `weight_only` does."""
    found: dict[int, str] = {}
    for name, spec in quantized().items():
        if WEIGHT_SCHEMES[name].int8_tokens == int8_tokens:
            found.setdefault(spec.bits, name)
    return dict(sorted(found.items()))


__all__ = ["WEIGHT_SCHEMES", "WeightData", "WeightScheme", "by_bits", "quantized", "weight_only"]
