"""Recipes from outside: the entries of a YAML file or of the command line, checked and made a Recipe.

scheme: w4a16          # or bits: 4
group_size: 128
head_bits: 8
method: awq-yaqa
ignore: [down_proj]
override:              # of several that match the last counts
  - {match: "re:.*layers[.]0[.]", scheme: w8a16, group_size: 64}
  - o_proj=fp16
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qrt.errors import ConfigError
from qrt.quant.kv import KV_FORMATS
from qrt.quant.weight import WEIGHT_ONLY, WEIGHT_SCHEMES
from qrt.registry import nearest
from qrt_calibrate.recipe import UNQUANTIZED, Grid, Override, Recipe, default_method, grid_of, scheme_of

PLAIN: dict[str, type | tuple[type, ...]] = {  # entries that go into the recipe as they are
    "method": str, "calib": str, "n_samples": int, "seqlen": int, "eval_samples": int, "seed": int,
    "damping": (int, float), "exact_folds": bool, "kv": str, "tune": int,
    "head_bits": int,
    "target_bits": (int, float), "max_size": (int, float),
}  # fmt: skip
GRID: dict[str, type | tuple[type, ...]] = {"bits": int, "scheme": str, "group_size": int, "symmetric": bool}
LISTS = ("ignore", "override", "rotations")
ALIASES = {"damp": "damping"}


def read_recipe(path: Path) -> dict[str, Any]:
    """The entries of a YAML file, keys with underscores."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--recipe: {path} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--recipe: {path} is not YAML ({reason})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--recipe: {path} holds {type(value).__name__}, wanted keys with values")
    entries = {str(key).replace("-", "_"): entry for key, entry in value.items()}
    return {ALIASES.get(key, key): entry for key, entry in entries.items()}


def recipe_of(entries: Mapping[str, Any]) -> Recipe:
    """The recipe of some entries; ConfigError for an unknown key or a value of the wrong kind."""
    for key, value in entries.items():
        _check(key, value)
    scheme = scheme_of(entries.get("bits"), entries.get("scheme"))
    spec = grid_of(scheme, entries.get("group_size"), entries.get("symmetric"))
    plain = {key: value for key, value in entries.items() if key in PLAIN}
    plain.setdefault("method", default_method(scheme))
    overrides = tuple(_override(entry) for entry in entries.get("override", ()))
    return Recipe(
        scheme=scheme,
        spec=spec,
        ignore=tuple(entries.get("ignore", ())),
        overrides=overrides,
        rotations=tuple(entries.get("rotations", ())),
        zeros_asked="symmetric" in entries,
        **plain,
    )


def _check(key: str, value: Any) -> None:
    known = {**PLAIN, **GRID}
    if key in LISTS:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key}: got {value!r}, wanted a list")
        for entry in value:
            if key != "override" and not isinstance(entry, str):
                raise ConfigError(f"{key}: got {entry!r} in the list, wanted text")
        return
    if key not in known:
        raise ConfigError(f"recipe: unknown key {key!r}{nearest(key, [*known, *LISTS])}")
    wanted = known[key]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{key}: got {value!r}, wanted {getattr(wanted, '__name__', 'a number')}")
    for name, choices in (("scheme", WEIGHT_SCHEMES), ("bits", WEIGHT_ONLY), ("kv", KV_FORMATS)):
        if key == name and (value not in choices or value == UNQUANTIZED and key == "scheme"):
            listed = ", ".join(str(choice) for choice in choices if choice != UNQUANTIZED or key == "kv")
            raise ConfigError(f"{key}: got {value!r}, wanted one of {listed}")


def _override(entry: Any) -> Override:
    """ "PATTERN=SCHEME", or {match: PATTERN, scheme: ..., group_size: ..., symmetric: ...}."""
    if isinstance(entry, str) and "=" in entry:
        pattern, _, scheme = entry.rpartition("=")
        entry = {"match": pattern, "scheme": scheme}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("match"), str) or not entry["match"]:
        raise ConfigError(f"override: got {entry!r}, wanted PATTERN=SCHEME or {{match: ..., scheme: ...}}")
    rest = {str(key).replace("-", "_"): value for key, value in entry.items() if key != "match"}
    if rest == {"scheme": UNQUANTIZED}:
        return Override(entry["match"], None)
    for key, value in rest.items():
        if key not in GRID:
            raise ConfigError(f"override {entry['match']!r}: unknown key {key!r}{nearest(key, list(GRID))}")
        _check(key, value)
    scheme = scheme_of(rest.get("bits"), rest.get("scheme"))
    return Override(
        entry["match"], Grid(scheme, grid_of(scheme, rest.get("group_size"), rest.get("symmetric")))
    )
