"""Group sizes: choose one that divides the inputs if the user names none, refuse one that does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from qrt.errors import ConfigError
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.spec import GROUP_SIZES
from qrt_calibrate.recipe.recipe import LinearRecipe, Recipe

Inputs = Mapping[str, int]  # full names of Linears -> their input features


def choose_groups(
    checkpoint: Checkpoint, grids: Mapping[str, LinearRecipe | None], recipe: Recipe
) -> tuple[Recipe, tuple[str, ...]]:
    """Choose the group size of each grid that leaves it open: the largest that divides all its Linears.

    Returns the recipe with these grids, and a note for each grid whose groups became smaller. `grids` are
    those of `matched`. Raises ConfigError where no size divides.
    """
    chosen: dict[LinearRecipe, LinearRecipe] = {}
    notes = []
    for grid in dict.fromkeys((recipe.grid, *(override.grid for override in recipe.overrides))):
        if grid is None or not grid.group_open:
            continue
        inputs = _inputs(checkpoint, {name: own for name, own in grids.items() if own == grid})
        size = _group_for(inputs, grid, is_main=grid == recipe.grid)
        chosen[grid] = LinearRecipe(grid.scheme, replace(grid.spec, group_size=size))
        if size != grid.spec.group_size:
            remedy = "; --group-size chooses another size" if grid == recipe.grid else ""
            notes.append(_note(inputs, grid, size) + remedy)
    main = chosen.get(recipe.grid, recipe.grid)
    overrides = tuple(
        replace(override, grid=chosen.get(override.grid, override.grid)) if override.grid else override
        for override in recipe.overrides
    )
    return replace(recipe, spec=main.spec, group_open=False, overrides=overrides), tuple(notes)


def _inputs(checkpoint: Checkpoint, grids: Mapping[str, LinearRecipe | None]) -> dict[str, int]:
    """Return the input features of the Linears that have a grid."""
    return {name: checkpoint.spec(f"{name}.weight").shape[-1] for name, grid in grids.items() if grid}


def _group_for(inputs: Inputs, grid: LinearRecipe, is_main: bool) -> int:
    """Return the largest group size, the grid's own or a smaller one, that divides all `inputs`."""
    usual = grid.spec.group_size
    assert usual is not None
    if not inputs:
        return usual
    sizes = (usual, *(size for size in GROUP_SIZES if size < usual))
    common = gcd(*inputs.values())
    for size in sizes:
        if common % size == 0:
            return size
    name, count = next((name, count) for name, count in inputs.items() if count % sizes[-1])
    per_channel = "--group-size -1" if is_main else "group_size: -1 for this override in a --recipe file"
    listed = " or ".join(", ".join(map(str, sizes)).rsplit(", ", 1))
    raise ConfigError(
        f"{name}: expected input features that groups of {listed} divide, got {count}; "
        f"use {per_channel} (one scale per channel) or leave the layer unquantized with --ignore"
    )


def _note(inputs: Inputs, grid: LinearRecipe, size: int) -> str:
    usual = grid.spec.group_size
    assert usual is not None
    name, count = next((name, count) for name, count in inputs.items() if count % usual)
    return f"{grid.scheme} has groups of {size} inputs, because {usual} does not divide the {count} of {name}"


def check_groups(checkpoint: Checkpoint, grids: Mapping[str, LinearRecipe | None]) -> None:
    """Raise ConfigError for the first Linear with input features that its groups do not divide.

    The error suggests a group size that divides the input features of all Linears.
    """
    inputs = _inputs(checkpoint, grids)
    common = gcd(*inputs.values())
    for name, count in inputs.items():
        grid = grids[name]
        assert grid is not None
        try:
            grid.spec.group_of(count, common)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
