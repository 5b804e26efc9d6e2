"""compressed-tensors: read a `quantization_config`, which says how each Linear is quantized, and write one.

Reads groups of int4, int8, fp8 and MXFP4 weights in any of four layouts, chosen per group, for modules named
exactly, by regular expression or by class. fp8 weights run as 16-bit weights, and activations beside floats
are not rounded; this is closer to the original than what the file asks for, and a warning says so. Everything
else in the config would change what the model computes and is refused by name. Writes the minimal config that
every version of compressed-tensors loads (docs/checkpoint-formats.md#what-is-written).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint.config_group import (
    ACTIVATIONS,
    Group,
    layout_in,
    layout_of,
    patterns,
    read_group,
)
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.format import REMEDY, CheckpointFormat, Plain, codes_of
from qrt.quant.module_names import HEAD, REGEX, is_head, names_of, patterns_of
from qrt.quant.spec import QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData

LINEAR = "Linear"  # class name of every module that `Checkpoint.linear` reads
# Entries that change what the model computes; they may be absent or empty.
REFUSED = {
    "kv_cache_scheme": "delete the entry and choose the KV format with --kv",
    "transform_config": "quantize without transforms",
    "sparsity_config": "quantize without sparsity",
    "moe_sparsity_config": "quantize without sparsity",
}


class CompressedTensors(CheckpointFormat):
    """quant_method "compressed-tensors"."""

    def __init__(self, config: Mapping[str, Any], tensors: TensorFolder) -> None:
        where = f"{tensors.path}/config.json"
        check_transforms(tensors.path, config)
        self._ignore = patterns(where, config.get("ignore") or [])
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise CheckpointError(
                f"{where}: config_groups: expected at least one group, got {groups!r}; "
                "delete quantization_config if the weights are not quantized"
            )
        stated = config.get("format")
        layouts = self._layouts(where, groups, tensors)
        read = [read_group(where, name, entry, stated, layouts.get(name)) for name, entry in groups.items()]
        self._groups = {target: group for group in read for target in group.targets}  # the last one wins
        self._listed = {*self._ignore, *self._groups}
        modules = {own for name in tensors.names() for own in names_of(name.rpartition(".")[0])}
        for target in self._groups:
            if modules and not target.startswith(REGEX) and target != LINEAR and target not in modules:
                raise UnsupportedError(
                    f"{where}: target {target!r} is neither a module of this checkpoint nor {LINEAR!r}, "
                    f"the one class that qrt runs quantized; {REMEDY}"
                )

    def linear(self, tensors: TensorFolder, module: str) -> tuple[str, WeightData]:
        """Decode `module` as its group says; unquantized where it is ignored or no group targets it."""
        group = self._group_of(module, tensors)
        if group is None:
            if (name := codes_of(tensors, module)) is not None:
                raise UnsupportedError(
                    f"{tensors.path}: {tensors.name_in_messages(name)}: quantized, but no group of "
                    f"quantization_config means {module}; take it out of `ignore`, or add it to `targets`"
                )
            return Plain().linear(tensors, module)
        return group.scheme, group.decode(tensors, module)

    def grid(self, module: str) -> tuple[str, QuantSpec | None]:
        """See CheckpointFormat."""
        group = self._group_of(module)
        return ("fp16", None) if group is None else (group.scheme, group.spec)

    def _group_of(self, module: str, tensors: TensorFolder | None = None) -> Group | None:
        """Return the group whose target means `module`; None where it is ignored or no group targets it.

        Tools list modules by the names that transformers had when they ran (`names_of`). A name that is
        listed counts first, then that of the tensors. If the file says nothing of that one, the first of the
        others, or the class, counts that agrees with `tensors`.
        """
        names = sorted(names_of(module), key=lambda name: name not in self._listed)
        said = [group for name in names for group in self._said_of(name)] + [self._groups.get(LINEAR)]
        if tensors is not None and not self._said_of(module):
            quantized = tensors.has(f"{module}.weight_scale")
            said = [group for group in said if (group is not None) is quantized] or said
        return said[0]

    def _said_of(self, name: str) -> list[Group | None]:
        """Return the group that means a Linear of this name, None where it is ignored, or nothing."""
        if target_of(name, self._ignore) is not None:
            return [None]
        target = target_of(name, self._groups)
        return [] if target is None or target == LINEAR else [self._groups[target]]

    def _layouts(self, where: str, groups: Mapping[str, Any], tensors: TensorFolder) -> dict[str, str]:
        """Return the layout of each group as its tensors have it; without those of which no module tells."""
        owner = {
            target: name
            for name, entry in groups.items()
            if isinstance(entry, Mapping)
            for target in patterns(f"{where}: config_groups.{name}", entry.get("targets"))
        }
        found: dict[str, str] = {}
        for module in dict.fromkeys(name.rpartition(".")[0] for name in tensors.stored_names()):
            if len(found) == len(groups):
                break
            layout = layout_in(tensors, module)
            if layout is None or target_of(module, self._ignore) is not None:
                continue
            targets = (target_of(name, owner) for name in (module, *names_of(module)))
            if (target := next(filter(None, targets), None)) is not None:
                found.setdefault(owner[target], layout)
        return found


def check_transforms(path: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for an entry that changes what even plain weights compute, or the K/V cache."""
    for key, remedy in REFUSED.items():
        if config.get(key) and not _is_dense(config[key]):
            raise UnsupportedError(f"{path}/config.json: quantization_config.{key} is not read; {remedy}")


def _is_dense(entry: Any) -> bool:
    """Whether a sparsity config only counts zeros."""
    return isinstance(entry, Mapping) and entry.get("format") == "dense"


def target_of(module: str, targets: Collection[str]) -> str | None:
    """Return the one of `targets` that means a Linear called `module`, as compressed-tensors chooses.

    The exact name wins, then the alphabetically first of the "re:<regex from its start>" that match, then the
    class.
    """
    if module in targets:
        return module
    found = [t for t in targets if t.startswith(REGEX) and re.match(t.removeprefix(REGEX), module)]
    return min(found, default=LINEAR if LINEAR in targets else None)


def quantization_config(
    scheme: str,
    spec: QuantSpec,
    ignore: Sequence[str],
    metadata: Mapping[str, Any],
    overrides: Mapping[str, tuple[str, QuantSpec]] | None = None,
    modules: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the minimal config of a checkpoint whose Linears all have `scheme`, except those in `ignore`.

    `overrides` are modules on other grids; with them every group means its `modules` alone, because vLLM
    gives a fused Linear to a group that targets the class before it looks for the names of its parts. A
    quantized head is among the overrides or the modules and is always named. Regular expressions mean the
    others under all their names: files, transformers and engines do not agree in them.
    """
    default = (scheme, spec)
    targets = dict.fromkeys(modules, default) | dict(overrides or {})
    if {grid for module, grid in targets.items() if not is_head(module)} <= {default}:
        targets = {LINEAR: default} | {module: grid for module, grid in targets.items() if is_head(module)}
    kinds = sorted(set(targets.values()), key=lambda grid: (grid != default, str(grid)))
    groups = {
        f"group_{n}": _entry(*kind, targets_of([target for target, grid in targets.items() if grid == kind]))
        for n, kind in enumerate(kinds)
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": groups,
        "qrt": dict(metadata),
    }


def targets_of(modules: Sequence[str]) -> list[str]:
    """Return targets that mean `modules`: the class and the head by name, expressions of all others."""
    named = [name for name in modules if name in (LINEAR, HEAD)]
    others = patterns_of(name for name in modules if name not in named)
    return [*named, *(REGEX + pattern for pattern in others)]


def _entry(scheme: str, spec: QuantSpec, targets: list[str]) -> dict[str, Any]:
    """Return one group of the config."""
    weights = {
        "num_bits": spec.bits,
        "type": "int",
        "symmetric": spec.symmetric,
        "strategy": spec.granularity.value,
    }
    if spec.group_size is not None:
        weights["group_size"] = spec.group_size
    group: dict[str, Any] = {"targets": targets, "format": layout_of(scheme).name, "weights": weights}
    if WEIGHT_SCHEMES[scheme].int8_tokens:
        group["input_activations"] = {key: value for key, (value,) in ACTIVATIONS.items()}
    return group
