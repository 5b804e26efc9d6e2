"""What --ignore leaves out, and what it may not."""

import pytest

from qrt.arch import ARCHS
from qrt.errors import ConfigError
from qrt_calibrate.selection import select

ARCH = ARCHS["LlamaForCausalLM"]


def test_everything_but_the_head_by_default():
    selection = select(ARCH, 3, ())
    assert len(selection.quantized) == 21 and selection.ignored == ("lm_head",)
    assert selection.quantized[0] == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "patterns, left",
    [
        (("down_proj",), 18),
        (("mlp.down_proj", "o_proj"), 15),
        (("model.layers.0.*",), 14),
        (("layers.0.mlp.*", "lm_head"), 18),
        (("[qkv]_proj",), 12),
    ],
)
def test_patterns_match_whole_names_or_from_a_dot(patterns, left):
    selection = select(ARCH, 3, patterns)
    assert len(selection.quantized) == left
    assert len(selection.ignored) == 1 + 21 - left and selection.ignored[0] == "lm_head"
    assert set(selection.quantized).isdisjoint(selection.ignored)


@pytest.mark.parametrize(
    "patterns, message",
    [
        (("down_prj",), r"--ignore 'down_prj' matches no Linear; did you mean 'down_proj'\?"),
        (("roj",), "--ignore 'roj' matches no Linear"),  # no match inside a name
        (("layers.7.*",), "matches no Linear"),
        (("*",), "leaves nothing to quantize"),
        (("q_proj",), r"self_attn\.q_proj of model\.layers\.0\.self_attn\.qkv_proj, .*; ignore all of"),
        (("layers.2.mlp.up_proj",), r"mlp\.up_proj of model\.layers\.2\.mlp\.gate_up_proj"),
    ],
)
def test_refused(patterns, message):
    with pytest.raises(ConfigError, match=message):
        select(ARCH, 3, patterns)
