"""Choose the scheme of a quantized head: int8, with one scale per output channel."""

from __future__ import annotations

from dataclasses import replace

from qrt.errors import ConfigError
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES

HEAD_BITS = (8, 16)


def head_grid(scheme: str, bits: int) -> tuple[str, QuantSpec | None]:
    """Return the scheme and grid of a head of `bits` behind layers in `scheme`.

    It is unquantized at 16 bits, and in the scheme's `head` at 8. ConfigError for other bits, and for 8 where
    the layers are not quantized.
    """
    if bits not in HEAD_BITS:
        raise ConfigError(f"--head-bits: expected one of {', '.join(map(str, HEAD_BITS))}, got {bits}")
    if bits == 16:
        return "fp16", None
    name = WEIGHT_SCHEMES[scheme].head
    if name is None:
        raise ConfigError(f"--head-bits {bits}: expected quantized layers, got {scheme}; leave the flag out")
    spec = WEIGHT_SCHEMES[name].spec
    assert spec is not None
    return name, replace(spec, symmetric=True, granularity=Granularity.CHANNEL, group_size=None)
