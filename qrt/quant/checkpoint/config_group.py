"""One entry of compressed-tensors' config_groups: check it, and turn it into what reads its modules."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant import e2m1
from qrt.quant.checkpoint import mxfp4
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.format import REMEDY, CodeKind, block_of, codes_of, kind_of
from qrt.quant.checkpoint.layout import CodeLayout, FloatQuantized, IntQuantized, PackQuantized
from qrt.quant.module_names import REGEX
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData

logger = logging.getLogger(__name__)

NAIVE = "naive-quantized"  # old name of the two layouts with one byte per code
LAYOUTS: dict[str, CodeLayout] = {layout.name: layout for layout in (PackQuantized(), IntQuantized())}
# Defaults of `weights` and `input_activations` (QuantizationArgs of compressed-tensors).
DEFAULTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": None,
    "group_size": None,
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
}
WEIGHTS: dict[str, tuple[Any, ...]] = {
    "type": ("int",),
    "symmetric": (True, False),
    "strategy": ("group", "channel"),
    "dynamic": (False,),
    # the last two, also True, have a weight_g_idx
    "actorder": (None, False, True, "weight", "static", "group", "dynamic"),
    "block_structure": (None,),
}
FP8_BLOCKS = {"tensor": (None, None), "channel": (1, None)}  # rows and columns of a scale; None: all of them
FP8_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "strategy": ("channel", "tensor", "block"),
    "dynamic": (False,),
}
MXFP4 = "mxfp4-pack-quantized"
READ = (*LAYOUTS, FloatQuantized.name, MXFP4)
UNTOLD = ("mixed-precision", "dense")  # formats of a whole file, which say nothing about a group
MXFP4_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("float",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (e2m1.GROUP,),
    "dynamic": (False,),
}
ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("token",),
    "dynamic": (True,),
}


@dataclass(frozen=True)
class Group:
    """One entry of config_groups.

    targets         modules of the group
    scheme, spec    scheme and grid of the loaded weights; spec is None for plain weights
    decode          reads one of the modules
    """

    targets: tuple[str, ...]
    scheme: str
    spec: QuantSpec | None
    decode: Callable[[TensorFolder, str], WeightData]


def layout_of(scheme: str) -> CodeLayout:
    """Return how `scheme` is written; UnsupportedError for a scheme that has no layout here."""
    stored = WEIGHT_SCHEMES[scheme].stored
    if stored is None:
        raise UnsupportedError(
            f"weight scheme: expected one that compressed-tensors has a layout for "
            f"({', '.join(_stored_schemes())}), got {scheme!r}"
        )
    return LAYOUTS[stored]


def _stored_schemes() -> list[str]:
    """Return the schemes that files hold."""
    return [name for name in WEIGHT_SCHEMES if WEIGHT_SCHEMES[name].stored is not None]


def _described(scheme: str) -> str:
    """Return what a file says of `scheme`: `int-quantized with 8 bits and int8 activations`."""
    kind = WEIGHT_SCHEMES[scheme]
    assert kind.spec is not None
    rounded = " and int8 activations" if kind.int8_tokens else ""
    return f"{kind.stored} with {kind.spec.bits} bits{rounded}"


def layout_in(tensors: TensorFolder, module: str) -> str | None:
    """Return the layout that the tensors of `module` have; None where its weight is plain."""
    kind, codes = kind_of(tensors, module), codes_of(tensors, module)
    if kind is not CodeKind.INTEGERS or codes is None:
        return None if kind is None else {CodeKind.FP8: FloatQuantized.name, CodeKind.MXFP4: MXFP4}[kind]
    return PackQuantized.name if codes.endswith("packed") else IntQuantized.name


def _layout(where: str, stated: Any, found: str | None, weights: Any) -> Any:
    """Return the layout of a group: what its tensors have, unless the config states one that qrt lacks."""
    if stated == NAIVE:
        is_float = isinstance(weights, Mapping) and weights.get("type") == "float"
        stated = FloatQuantized.name if is_float else IntQuantized.name
    if found is None or stated not in (None, *UNTOLD, *READ):
        return stated
    if stated not in (None, found, *UNTOLD):
        logger.warning("%s.format: is %s, but the tensors are %s; they decide", where, stated, found)
    return found


def read_group(where: str, name: str, entry: Any, default_format: Any, found: str | None = None) -> Group:
    """Check one entry of config_groups and turn it into values; `found` is the layout of its tensors."""
    where = f"{where}: config_groups.{name}"
    if not isinstance(entry, dict):
        raise UnsupportedError(
            f"{where}: expected a group written out as an object, not a preset, got {entry!r}"
        )
    weights = entry.get("weights")
    layout = _layout(where, entry.get("format") or default_format, found, weights)
    if layout == FloatQuantized.name:
        return _fp8_group(where, entry)
    if layout == MXFP4:
        return _mxfp4_group(where, entry)
    weights = _arguments(f"{where}.weights", weights, WEIGHTS)
    activations = entry.get("input_activations")
    if activations is not None:
        _arguments(f"{where}.input_activations", activations, ACTIVATIONS)
    if entry.get("output_activations") is not None:
        raise UnsupportedError(f"{where}.output_activations is not read; quantize without it")
    bits = weights["num_bits"]
    for scheme in _stored_schemes():
        kind = WEIGHT_SCHEMES[scheme]
        assert kind.spec is not None
        alike = (kind.spec.bits, kind.int8_tokens) == (bits, activations is not None)
        if alike and (layout == kind.stored or kind.int8_tokens and layout == IntQuantized.name):
            granularity = Granularity(weights["strategy"])
            spec = replace(
                kind.spec,
                symmetric=weights["symmetric"],
                granularity=granularity,
                group_size=weights["group_size"],
            )
            if LAYOUTS[layout].holds(spec):
                decode = partial(LAYOUTS[layout].decode, spec=spec)
                return Group(patterns(where, entry.get("targets")), scheme, spec, decode)
    raise UnsupportedError(
        f"{where}: expected {', '.join(map(_described, _stored_schemes()))}, float-quantized or {MXFP4}, "
        f"got {layout} with {bits}-bit {weights['strategy']} weights"
        f"{' and int8 activations' if activations is not None else ''}; {REMEDY}"
    )


def _fp8_group(where: str, entry: Mapping[str, Any]) -> Group:
    """Read an entry of fp8 weights; what it says about activations is ignored, because qrt rounds none."""
    weights = _arguments(f"{where}.weights", entry.get("weights"), FP8_WEIGHTS)
    block = FP8_BLOCKS.get(weights["strategy"]) or block_of(
        f"{where}.weights.block_structure", weights["block_structure"]
    )
    logger.warning("%s: fp8 weights run as 16-bit weights, activations are not rounded", where)
    return Group(patterns(where, entry.get("targets")), "fp16", None, FloatQuantized(block).decode)


def _mxfp4_group(where: str, entry: Mapping[str, Any]) -> Group:
    """Read an entry of MXFP4 weights; activations are not rounded, whatever it says about them."""
    _arguments(f"{where}.weights", entry.get("weights"), MXFP4_WEIGHTS)
    if entry.get("input_activations") is not None:
        logger.warning("%s: activations are not rounded", where)
    spec = WEIGHT_SCHEMES[mxfp4.SCHEME].spec
    return Group(patterns(where, entry.get("targets")), mxfp4.SCHEME, spec, mxfp4.packed_linear)


def _arguments(where: str, entry: Any, known: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Read a `weights` or `input_activations` entry with its defaults; each value is one of `known`."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: expected an object, got {entry!r}")
    values = {**DEFAULTS, **entry}
    bits, size = values["num_bits"], values["group_size"]
    if type(bits) is not int:
        raise CheckpointError(f"{where}.num_bits: expected a whole number, got {bits!r}")
    if values["strategy"] is None and size is not None:
        values["strategy"] = "channel" if size == -1 else "group"
    if values["strategy"] == "group":
        if type(size) is not int or size < 1:
            raise CheckpointError(f"{where}.group_size: expected a positive number, got {size!r}")
    else:
        values["group_size"] = None
    for key, allowed in known.items():
        if values[key] not in allowed:
            expected = " or ".join(repr(value) for value in allowed)
            raise UnsupportedError(f"{where}.{key}: expected {expected}, got {values[key]!r}; {REMEDY}")
    return values


def patterns(where: str, entry: Any) -> tuple[str, ...]:
    """Read a list of `targets` or `ignore`: strings, each "re:" one a regular expression that compiles."""
    if not isinstance(entry, list) or not all(isinstance(target, str) for target in entry):
        raise CheckpointError(f"{where}: expected lists of strings for targets and ignore, got {entry!r}")
    for target in entry:
        try:
            re.compile(target.removeprefix(REGEX) if target.startswith(REGEX) else "")
        except re.error as error:
            raise CheckpointError(f"{where}: {target!r} is not a regular expression ({error})") from None
    return tuple(entry)
