"""Without a group size the largest of 128, 64 and 32 that divides the inputs is taken, and said once."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import qrt
from qrt.errors import ConfigError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.spec import largest_group
from qrt.quant.weight import weight_only
from qrt_calibrate import cli
from qrt_calibrate.estimate.budget import budget_of
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import plan
from qrt_calibrate.recipe.recipe_file import recipe_of

CPU = torch.device("cpu")
INNER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def odd(make_checkpoint):
    """128 divides the hidden size; 64 the inner size, 320."""
    return make_checkpoint("LlamaForCausalLM", intermediate_size=320)


@pytest.fixture(scope="module")
def odder(make_checkpoint):
    """32 divides the hidden size, 96; none of the sizes the inner size, 336."""
    return make_checkpoint("LlamaForCausalLM", hidden_size=96, intermediate_size=336)


def sizes(folder, **entries):
    """Group size by Linear of layer 0."""
    job = plan(open_checkpoint(folder), recipe_of({"bits": 4, "method": "rtn", **entries}), CPU)
    assert not any(grid.group_open for grid in job.quantized.values())
    return {name.rpartition(".")[2]: grid.spec.group_size for name, grid in job.layer_grids(0).items()}


@pytest.mark.parametrize("count", [32, 96, 128, 160, 192, 336, 576, 1376, 1536, 4096])
def test_largest_group_divides_and_its_double_does_not(count):
    size = largest_group(count)
    if size is None:
        assert count % 32
    else:
        assert count % size == 0 and (size == 128 or count % (2 * size))


@pytest.mark.parametrize("bits", [4, 8])
def test_one_size_divides_all_quantized_linears(odd, llama, bits):
    assert set(sizes(odd, bits=bits).values()) == {64}
    assert set(sizes(llama, bits=bits).values()) == {128}


def test_ignored_linears_do_not_count(odd, odder):
    assert set(sizes(odd, ignore=["down_proj"]).values()) == {128}
    assert set(sizes(odd, override=["down_proj=fp16"]).values()) == {128}
    assert set(sizes(odd, ignore=["layers.1.*"]).values()) == {64}  # layer 0 has one yet
    assert set(sizes(odder, ignore=["down_proj"]).values()) == {32}


def test_each_grid_has_its_own_size(odd):
    found = sizes(odd, override=["down_proj=w8a16"])
    assert found.pop("down_proj") == 64 and set(found.values()) == {128}
    found = sizes(odd, group_size=32, override=["down_proj=w8a16", "o_proj=w4a16"])
    assert (found.pop("down_proj"), found.pop("o_proj")) == (64, 128) and set(found.values()) == {32}
    found = sizes(odd, override=[{"match": "o_proj", "scheme": "w8a16", "group_size": 32}])
    assert found.pop("o_proj") == 32 and set(found.values()) == {64}


def test_override_with_the_chosen_grid_keeps_fused_linears(odd):
    same = {"match": "q_proj", "scheme": "w4a16", "group_size": 64}
    assert set(sizes(odd, override=[same]).values()) == {64}
    with pytest.raises(ConfigError, match="q_proj is w4a16 g128 asym, self_attn.k_proj is w4a16 g64 asym"):
        sizes(odd, override=[same | {"group_size": 128}])


def test_experts_count(make_checkpoint):
    mixture = make_checkpoint("Qwen3MoeForCausalLM", num_experts=8, moe_intermediate_size=96)
    assert set(sizes(mixture).values()) == {32}
    assert set(sizes(mixture, ignore=["experts.*"]).values()) == {128}


def test_a_size_that_was_asked_for_is_not_replaced(odd):
    with pytest.raises(ConfigError, match=r"down_proj: group size 128 does not divide 320 .*\(e\.g\. 64\)"):
        sizes(odd, group_size=128)
    assert set(sizes(odd, group_size=-1).values()) == {None}


def test_error_names_linear_and_remedy_if_no_group_size_divides(odder):
    with pytest.raises(ConfigError) as error:
        sizes(odder)
    assert str(error.value) == (
        f"{INNER}: expected input features that groups of 128, 64 or 32 divide, got 336; use --group-size -1 "
        "(one scale per channel) or leave the layer unquantized with --ignore"
    )
    with pytest.raises(ConfigError, match=rf"{INNER}: .* use group_size: -1 for this override"):
        sizes(odder, override=["down_proj=w8a16"])


def test_a_budget_keeps_the_chosen_size(odd):
    job = plan(open_checkpoint(odd), recipe_of({"bits": 4, "method": "rtn", "target_bits": 6}), CPU)
    grids = budget_of(job).grids
    sizes = {bits: grid and grid.spec.group_size for bits, grid in grids.items()}
    assert sizes == dict.fromkeys(weight_only(), 64) | {16: None}


def test_chosen_group_is_told_once_on_screen_and_in_the_report(odd, calib, tmp_path, capsys):
    note = f"w4a16 has groups of 64 inputs, because 128 does not divide the 320 of {INNER}; --group-size"
    cut = ["--n-samples", "2", "--seqlen", "32", "--eval-samples", "2"]
    words = ["--model", odd, "--calib", calib, "--out", tmp_path / "out", *cut]
    budget = ["--method", "rtn", "--target-bits", "6"]
    assert cli.main([str(word) for word in [*words, *budget]]) == 0
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("because 128 does not divide") == 1 and f"note: {note}" in shown.err
    findings = json.loads((tmp_path / "out/qrt_report.json").read_text())["findings"]
    assert [note in finding for finding in findings].count(True) == 1
    assert note in (tmp_path / "out/qrt_report.html").read_text()


def test_a_size_that_all_models_have_is_not_mentioned(llama, odd):
    for folder, entries in ((llama, {}), (odd, {"group_size": 64}), (odd, {"group_size": -1})):
        job = plan(open_checkpoint(folder), recipe_of({"bits": 4, "method": "rtn", **entries}), CPU)
        assert job.notes == () and not any(
            "groups of" in f for f in preflight(job).findings if "GPU" not in f
        )


def test_a_model_in_memory_is_quantized_without_a_group_size(odd):
    folder = qrt.quantize(AutoModelForCausalLM.from_pretrained(odd), bits=4)
    assert open_checkpoint(folder).linear(INNER)[1].scale.shape == (128, 5)
