"""A recipe: everything that decides a quantized checkpoint's bytes, besides the checkpoint itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qrt import __version__
from qrt.errors import ConfigError
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES

SCHEME_OF_BITS = {4: "w4a16", 8: "w8a16"}


@dataclass(frozen=True)
class Recipe:
    """scheme and grid, method, Linears to leave out, and the calibration text's shape.

    ignore      globs over Linear names, whole or from any dot: "lm_head", "down_proj", "model.layers.0.*"
    calib       a text file; None is the default text
    n_samples   windows of `seqlen` tokens each, drawn with `seed`
    """

    scheme: str
    spec: QuantSpec
    method: str
    ignore: tuple[str, ...] = ()
    calib: str | None = None
    n_samples: int = 128
    seqlen: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_samples < 1:
            raise ConfigError(f"--n-samples: got {self.n_samples}, wanted at least 1")
        if self.seqlen < 2:
            raise ConfigError(f"--seqlen: got {self.seqlen}, wanted at least 2")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed: got {self.seed}, wanted 0 to 2^63 - 1")

    def metadata(self) -> dict[str, Any]:
        """What `quantization_config["qrt"]` says of it: no time, no path, so reruns write the same bytes."""
        return {"version": __version__, "scheme": self.scheme, "method": self.method}


def scheme_of(bits: int | None, scheme: str | None) -> str:
    """The scheme's name from --bits, --scheme or both, if they agree; w4a16 without either."""
    if scheme is None:
        return SCHEME_OF_BITS[bits or 4]
    spec = WEIGHT_SCHEMES[scheme].spec
    if bits is not None and spec is not None and spec.bits != bits:
        raise ConfigError(f"--bits {bits} contradicts --scheme {scheme}; give one of the two")
    return scheme


def grid_of(scheme: str, group_size: int | None, symmetric: bool | None) -> QuantSpec:
    """The scheme's default grid with the given changes; ConfigError for a grid the scheme cannot have."""
    spec = WEIGHT_SCHEMES[scheme].spec
    assert spec is not None, f"{scheme} is not a quantized scheme"
    if spec.granularity is not Granularity.GROUP:
        if group_size is not None:
            raise ConfigError(f"--group-size: {scheme} has one scale per output channel; leave the flag out")
        if symmetric is False:
            raise ConfigError(f"--asym: {scheme} multiplies symmetric int8 codes; leave the flag out")
        return spec
    if group_size is not None:
        spec = replace(spec, group_size=group_size)
    return spec if symmetric is None else replace(spec, symmetric=symmetric)


def default_method(spec: QuantSpec) -> str:
    """AWQ for the group grids of the weight-only schemes; a channel scale leaves it nothing to search."""
    return "awq" if spec.granularity is Granularity.GROUP else "rtn"
