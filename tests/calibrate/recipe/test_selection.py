"""What --ignore leaves out, and what it may not."""

import pytest

from qrt.arch.read import read_arch
from qrt.errors import ConfigError
from qrt_calibrate.recipe.recipe import LinearRecipe, Override, Recipe, grid_of
from qrt_calibrate.recipe.selection import select as select_grids

ARCH = read_arch({"architectures": ["LlamaForCausalLM"]}, "model")
W4, W8 = (LinearRecipe(scheme, grid_of(scheme, None, None)) for scheme in ("w4a16", "w8a16"))


def select(arch, layers, patterns, *overrides):
    recipe = Recipe("w4a16", W4.spec, "rtn", ignore=patterns, overrides=overrides)
    return select_grids(arch.of_layers(layers), recipe)


def test_everything_but_the_head_by_default():
    grids = select(ARCH, 3, ())
    assert len(grids) == 21 and set(grids.values()) == {W4}
    assert next(iter(grids)) == "model.layers.0.self_attn.q_proj" and "lm_head" not in grids


@pytest.mark.parametrize(
    "patterns, left",
    [
        (("down_proj",), 18),
        (("mlp.down_proj", "o_proj"), 15),
        (("model.layers.0.*",), 14),
        (("layers.0.mlp.*", "lm_head"), 18),
        (("[qkv]_proj",), 12),
        ((r"re:.*layers\.[01]\..*(gate|up)_proj$",), 17),
    ],
)
def test_patterns_match_whole_names_or_from_a_dot(patterns, left):
    grids = select(ARCH, 3, patterns)
    assert sum(grid is not None for grid in grids.values()) == left


def test_last_override_counts_and_ignore_wins():
    grids = select(ARCH, 2, ("layers.1.mlp.*",), Override("down_proj", W8), Override("layers.0.*", None))
    kinds = {name.removeprefix("model.layers."): grid for name, grid in grids.items()}
    assert {grid for name, grid in kinds.items() if name.startswith("0.")} == {None}
    assert kinds["1.mlp.down_proj"] is None and kinds["1.self_attn.o_proj"] == W4
    assert select(ARCH, 2, (), Override("down_proj", W8))["model.layers.1.mlp.down_proj"] == W8


def test_an_override_of_the_head_points_to_its_flag():
    for pattern in ("lm_head", "re:lm_.*"):
        with pytest.raises(ConfigError, match=f"an override '{pattern}' means lm_head; use --head-bits"):
            select(ARCH, 3, (), Override(pattern, W8))
    with pytest.raises(ConfigError, match=r"an override 'lm_haed' matches no Linear \(e.g."):
        select(ARCH, 3, (), Override("lm_haed", W8))
    with pytest.raises(ConfigError, match="--ignore 'lm_haed' matches no Linear; did you mean 'lm_head'"):
        select(ARCH, 3, ("lm_haed",))


@pytest.mark.parametrize(
    "patterns, message",
    [
        (("down_prj",), r"--ignore 'down_prj' matches no Linear; did you mean 'down_proj'\?"),
        (("roj",), "--ignore 'roj' matches no Linear"),  # no match inside a name
        (("layers.7.*",), "matches no Linear"),
        (("re:(",), r"'re:\(' is not a regular expression"),
        (("*",), "nothing is left to quantize"),
        (
            ("q_proj",),
            r"q_proj is left as it is, self_attn\.k_proj is w4a16 g128 asym, .*0\.self_attn\.qkv_proj as one",
        ),
        (
            ("layers.2.mlp.up_proj",),
            r"up_proj is left as it is, but engines run model\.layers\.2\.mlp\.gate_up_proj",
        ),
    ],
)
def test_refused(patterns, message):
    with pytest.raises(ConfigError, match=message):
        select(ARCH, 3, patterns)
