"""Recipes from a YAML file or the command line: check the entries and build a Recipe.

scheme: w4a16          # or bits: 4
group_size: 128
head_bits: 8
method: awq-yaqa
ignore: [down_proj]
override:              # the last one that matches wins
  - {match: "re:.*layers[.]0[.]", scheme: w8a16, group_size: 64}
  - o_proj=fp16
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from qrt.errors import ConfigError
from qrt.quant.weight import WEIGHT_SCHEMES, quantized, weight_only
from qrt.registry import nearest
from qrt_calibrate.recipe.method import METHODS, Scales
from qrt_calibrate.recipe.recipe import (
    UNQUANTIZED,
    LinearRecipe,
    Override,
    Recipe,
    grid_of,
    scheme_of,
)

TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (int, float)}
PLAIN = {  # entries that go into the recipe as they are
    own.name: TYPES[kind]
    for own in fields(Recipe)
    if own.metadata and (kind := str(own.type).removesuffix(" | None")) in TYPES
}
GRID: dict[str, type | tuple[type, ...]] = {"bits": int, "scheme": str, "group_size": int, "symmetric": bool}
LISTS = ("ignore", "override")
ALIASES = {"damp": "damping", "sym": "symmetric"}  # flags' names that are not the entry's
OPPOSITES = {"asym": "symmetric", "no_exact_fold": "exact_folds"}
BUDGETS = {"target_bits", "max_size"}
ONE_CHOICE = ({"bits", "scheme"}, BUDGETS)


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the entries of a YAML file, by the names that `recipe_of` knows."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--recipe: {path} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--recipe: {path} is not YAML ({reason})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--recipe: {path}: expected keys with values, got {type(value).__name__}")
    return _renamed(value)


def _renamed(entries: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the entries under their own names; ConfigError where two keys set the same entry."""
    found: dict[str, Any] = {}
    for given, value in entries.items():
        key = str(given).replace("-", "_")
        name = OPPOSITES.get(key, ALIASES.get(key, key))
        if name in found:
            raise ConfigError(f"recipe: {given!r} is the second key that sets {name}; give one of them")
        if key in OPPOSITES and not isinstance(value, bool):
            raise ConfigError(f"{given}: expected bool, got {value!r}")
        found[name] = not value if key in OPPOSITES else value
    return found


def with_flags(entries: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's entries with the flags put over them.

    A flag also removes the other key of a choice. One that changes the scheme removes a grid and a method
    that the new scheme cannot have.
    """
    for key, value in entries.items():
        _check(key, value)
    displaced = {key for choice in ONE_CHOICE if choice & flags.keys() for key in choice}
    if {"bits", "scheme"} & flags.keys():
        scheme = scheme_of(flags.get("bits"), flags.get("scheme"))
        changed = scheme != scheme_of(entries.get("bits"), entries.get("scheme"))
        method, kind = METHODS.get(entries.get("method", "")), WEIGHT_SCHEMES[scheme]
        if changed and kind.spec is not None and kind.spec.group_size is None:
            displaced |= {"group_size", "symmetric"}
        smooths = method is not None and method.scales is Scales.SMOOTHQUANT
        if changed and smooths and not kind.int8_tokens:
            displaced.add("method")
    return {key: value for key, value in entries.items() if key not in displaced} | dict(flags)


def recipe_of(entries: Mapping[str, Any]) -> Recipe:
    """Build a recipe from entries; ConfigError for an unknown key or a value of the wrong kind.

    A method that needs no text reads some only if eval_samples or a budget asks for it.
    """
    for key, value in entries.items():
        _check(key, value)
    grid = _grid(entries)
    plain = {key: value for key, value in entries.items() if key in PLAIN}
    plain.setdefault("method", WEIGHT_SCHEMES[grid.scheme].method)
    method = METHODS.get(plain["method"])
    if method is not None and not method.needs_text and not BUDGETS & entries.keys():
        plain.setdefault("eval_samples", 0)
    overrides = tuple(_override(entry) for entry in entries.get("override", ()))
    return Recipe(
        scheme=grid.scheme,
        spec=grid.spec,
        group_open=grid.group_open,
        ignore=tuple(entries.get("ignore", ())),
        overrides=overrides,
        zeros_asked="symmetric" in entries,
        **plain,
    )


def _check(key: str, value: Any) -> None:
    known = {**PLAIN, **GRID}
    if key in LISTS:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key}: expected a list, got {value!r}")
        for entry in value:
            if key != "override" and not isinstance(entry, str):
                raise ConfigError(f"{key}: expected text in the list, got {entry!r}")
        return
    if key == "rotations":
        raise ConfigError("rotations: qrt rotates no weights (it gained nothing); remove this entry")
    if key not in known:
        raise ConfigError(f"recipe: unknown key {key!r}{nearest(key, [*known, *LISTS])}")
    wanted = known[key]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{key}: expected {getattr(wanted, '__name__', 'a number')}, got {value!r}")
    for name, choices in (("scheme", quantized()), ("bits", list(weight_only()))):
        if key == name and value not in choices:
            listed = ", ".join(str(choice) for choice in choices)
            raise ConfigError(f"{key}: expected one of {listed}, got {value!r}")


def _override(entry: Any) -> Override:
    """Read "PATTERN=SCHEME", or {match: PATTERN, scheme: ..., group_size: ..., symmetric: ...}."""
    if isinstance(entry, str) and "=" in entry:
        pattern, _, scheme = entry.rpartition("=")
        entry = {"match": pattern, "scheme": scheme}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("match"), str) or not entry["match"]:
        raise ConfigError(f"override: expected PATTERN=SCHEME or {{match: ..., scheme: ...}}, got {entry!r}")
    rest = _renamed({key: value for key, value in entry.items() if key != "match"})
    if rest == {"scheme": UNQUANTIZED}:
        return Override(entry["match"], None)
    for key, value in rest.items():
        if key not in GRID:
            raise ConfigError(f"override {entry['match']!r}: unknown key {key!r}{nearest(key, list(GRID))}")
        _check(key, value)
    return Override(entry["match"], _grid(rest))


def _grid(entries: Mapping[str, Any]) -> LinearRecipe:
    """Return the grid that some of the GRID entries ask for."""
    scheme = scheme_of(entries.get("bits"), entries.get("scheme"))
    spec = grid_of(scheme, entries.get("group_size"), entries.get("symmetric"))
    return LinearRecipe(scheme, spec, spec.group_size is not None and "group_size" not in entries)
