"""Weight schemes, one line per scheme; the name is what checkpoints, flags and reports say."""

from qrt.quant.spec import QuantSpec
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


def quantized() -> dict[str, QuantSpec]:
    """Return the schemes whose weights are codes, with their default grids."""
    return {name: spec for name in WEIGHT_SCHEMES if (spec := WEIGHT_SCHEMES[name].spec) is not None}


def weight_only() -> dict[int, str]:
    """Return the schemes that round weights alone, by bits, fewest first; of two with as many, the first."""
    found: dict[int, str] = {}
    for name in WEIGHT_SCHEMES:
        scheme = WEIGHT_SCHEMES[name]
        if scheme.spec is not None and not scheme.int8_tokens:
            found.setdefault(scheme.spec.bits, name)
    return dict(sorted(found.items()))


__all__ = ["WEIGHT_SCHEMES", "WeightData", "WeightScheme", "quantized", "weight_only"]
