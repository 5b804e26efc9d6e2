"""The grid of each Linear: the recipe's, an override's or none, the same for a whole fused group."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from qrt.arch import Arch
from qrt.errors import ConfigError
from qrt.quant.module_names import REGEX, TOPS, below, names_of
from qrt.registry import nearest
from qrt_calibrate.recipe.recipe import LinearRecipe, Recipe


def select(arch: Arch, recipe: Recipe, others: Collection[str] = ()) -> dict[str, LinearRecipe | None]:
    """Return the grid of every Linear in the layers by full name, None where it stays unquantized.

    `others` are modules that are never quantized, which --ignore may mean too. Raises ConfigError: a pattern
    matches nothing, nothing is left to quantize, a fused group is split, or a head is both ignored and to be
    rounded.
    """
    grids = matched(arch, recipe, others)
    if not any(grids.values()):
        raise ConfigError("nothing is left to quantize; remove a pattern of --ignore, or an override")
    _check_fused(arch, grids)
    return grids


def _layers(arch: Arch) -> Iterator[tuple[str, Arch]]:
    """Yield the name of each layer, and the architecture as it has it."""
    for index in range(arch.num_layers):
        yield f"{arch.names.layers}.{index}", arch.at(index)


def matched(arch: Arch, recipe: Recipe, others: Collection[str] = ()) -> dict[str, LinearRecipe | None]:
    """Return what `select` does, without its checks of what is left and of fused groups."""
    grids: dict[str, LinearRecipe | None] = {
        f"{layer}.{projection}": recipe.grid for layer, own in _layers(arch) for projection in own.projections
    }
    for override in recipe.overrides:
        for name in _matching(arch, list(grids), override.pattern, "an override"):
            grids[name] = override.grid
    for pattern in recipe.ignore:
        for name in _matching(arch, [*grids, arch.names.head], pattern, "--ignore", others):
            if name != arch.names.head:
                grids[name] = None
            elif recipe.head is not None:
                raise ConfigError(
                    f"--ignore {pattern!r} means {arch.names.head}, "
                    f"which --head-bits {recipe.head_bits} rounds; "
                    "leave out one of them"
                )
    return grids


def _matching(
    arch: Arch, names: list[str], pattern: str, source: str, others: Collection[str] = ()
) -> list[str]:
    """Return the names that a pattern means; ConfigError if it means none, nor any of `others`."""
    found = meant(arch, names, pattern)
    if not found and meant(arch, others, pattern):
        return []
    if not found and meant(arch, [arch.names.head], pattern):
        raise ConfigError(
            f"{source} {pattern!r} means {arch.names.head}; use --head-bits, which alone rounds it"
        )
    if not found:
        known = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
        raise ConfigError(
            f"{source} {pattern!r} matches no Linear{nearest(pattern, known)} (e.g. {names[0]})"
        )
    return found


def meant(arch: Arch, names: Collection[str], pattern: str) -> list[str]:
    """Return those of the modules `names` that a pattern of --ignore or of an override means.

    The names of the checkpoint count first; if none matches, those that other files and tools have for the
    body, one way of naming after the other.
    """
    own = arch.names.layers.removesuffix(below(arch.names.layers))
    ways = ([name for name in names if _matches(name, pattern, top)] for top in (own, *TOPS))
    return next(filter(None, ways), [])


def _matches(module: str, pattern: str, top: str) -> bool:
    return any(_is_match(name, pattern) for name in names_of(module, top))


def _is_match(name: str, pattern: str) -> bool:
    if pattern.startswith(REGEX):
        try:
            return re.match(pattern.removeprefix(REGEX), name) is not None
        except re.error as error:
            raise ConfigError(f"{pattern!r} is not a regular expression ({error})") from None
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _check_fused(arch: Arch, grids: Mapping[str, LinearRecipe | None]) -> None:
    """Raise ConfigError unless all parts of a fused Linear, and all experts of a layer, have one grid."""
    for layer, own in _layers(arch):
        found: dict[LinearRecipe | None, str] = {}
        for part in own.projections:
            if own.is_expert(part):
                found.setdefault(grids[f"{layer}.{part}"], part)
        if len(found) > 1:
            grids_of = (f"{part} is {_described(grid)}" for grid, part in found.items())
            raise ConfigError(
                f"{', '.join(grids_of)}, but engines run all experts of {layer} as one; match "
                f"{own.experts.module if own.experts else None}.* or none of them"
            )
        for fused, parts in own.fuse:
            chosen = {part: grids[f"{layer}.{part}"] for part in parts}
            if len(set(chosen.values())) > 1:
                grids_of = (f"{part} is {_described(grid)}" for part, grid in chosen.items())
                raise ConfigError(
                    f"{', '.join(grids_of)}, but engines run {layer}.{fused} as one Linear; "
                    f"match all of {', '.join(parts)} or none"
                )


def _described(grid: LinearRecipe | None) -> str:
    return grid.describe() if grid else "left as it is"
