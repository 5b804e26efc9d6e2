"""--target-bits: prices are true KL divergences, and the budget is kept and well spent."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from outliers import Profile, make_hard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qrt.errors import ConfigError
from qrt.quant.affine import choose_qparams, dequantize, quantize
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate import cli
from qrt_calibrate.estimate import bits
from qrt_calibrate.estimate.bits import measure, spend
from qrt_calibrate.estimate.budget import Settled, Unit, budget_of
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import plan
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.recipe.recipe import LinearRecipe, Override, Recipe, grid_of

W4, W8 = (LinearRecipe(scheme, grid_of(scheme, None, None)) for scheme in ("w4a16", "w8a16"))
W4_BITS, W8_BITS = 4 + (16 + 4) / 128, 8 + 16 / 128  # per weight, with scales and zeros
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_widths(monkeypatch):
    """Budgets choose between 4 and 8 bits, whatever other schemes the registry has."""
    known = ("fp16", "w8a16", "w4a16", "w8a8", "w4a8", "mxfp4")
    monkeypatch.setattr(WEIGHT_SCHEMES, "_entries", {name: WEIGHT_SCHEMES._entries[name] for name in known})


@cache
def cached(make_checkpoint, dtype):
    return make_checkpoint("LlamaForCausalLM", dtype=dtype)


@torch.no_grad()
def test_prices_equal_those_of_the_whole_model(llama):
    job = plan(open_checkpoint(llama), Recipe("w4a16", W4.spec, "rtn"), CPU)
    windows = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    parts = [
        ("model.layers.0.self_attn.o_proj",),
        ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"),
    ]
    executor = LayerExecutor(job.checkpoint, job.arch, 32, CPU)
    units = [Unit(part, 1, {}) for part in parts]
    prices = measure(executor, units, {4: W4, 8: W8}, windows, torch.bfloat16)
    assert set(prices) == {(unit, bits) for unit in (0, 1) for bits in (4, 8)}
    for number, part in enumerate(parts):
        model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        p = model(windows).logits.log_softmax(-1)
        for name in part:
            weight = model.get_submodule(name).weight
            scale, zero = choose_qparams(weight, W4.spec, torch.bfloat16)
            weight.copy_(dequantize(quantize(weight, scale, zero, W4.spec), scale, zero, 4))
        q = model(windows).logits.log_softmax(-1)
        assert prices[number, 4] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-2)
        assert prices[number, 8] < 0.05 * prices[number, 4]
    int8 = measure(
        executor, units[:1], {8: LinearRecipe("w8a8", grid_of("w8a8", None, None))}, windows, torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    p = model(windows).logits.log_softmax(-1)
    linear = model.get_submodule(parts[0][0])
    scale = linear.weight.abs().amax(1, keepdim=True) / 127.5
    linear.weight.copy_((linear.weight / scale.bfloat16().float()).round() * scale.bfloat16().float())
    linear.register_forward_pre_hook(lambda module, x: (QuantizedTokens.of(x[0]).dequantize(),))
    q = model(windows).logits.log_softmax(-1)
    assert int8[0, 8] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=2e-2)


def test_spending():
    """Bytes go where they save most; what saves nothing gets none."""
    sizes = {4: 4.0, 8: 8.0, 16: 16.0}
    units = [Unit(("a",), 100, sizes), Unit(("b",), 100, sizes), Unit(("c",), 200, sizes)]
    prices = {(0, 4): 1.0, (0, 8): 0.1, (1, 4): 0.5, (1, 8): 0.45, (2, 4): 0.0, (2, 8): 0.0}
    grids = {4: W4, 8: W8, 16: None}

    def chosen(target):
        found = spend(units, prices, grids, target, Settled())
        assert found.curve[-1].bits <= target and found.curve[-1].kl <= found.curve[0].kl
        return [override.grid for override in found.overrides]

    assert chosen(4.0) == [W4, W4, W4] and chosen(4.9) == [W4, W4, W4]
    assert chosen(5.0) == [W8, W4, W4] and chosen(8.0) == [W8, None, W4]
    assert chosen(16.0) == [None, None, W4]


def test_overridden_linears_keep_their_width(llama):
    """Linears that an override pins elsewhere, and ignored ones, keep their bits too."""
    pins = (Override("q_proj", W4), Override("down_proj", W8))
    recipe = Recipe("w4a16", W4.spec, "rtn", ignore=("o_proj",), overrides=pins, target_bits=10.0)
    units = budget_of(plan(open_checkpoint(llama), recipe, CPU)).units
    parts = [[part.removeprefix("model.layers.") for part in unit.parts] for unit in units]
    assert parts == [[f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"] for layer in (0, 1)]


def test_widths_behind_int8_tokens_have_them_too(llama):
    recipe = Recipe("w4a8", grid_of("w4a8", 64, None), "rtn", target_bits=6.0)
    grids = budget_of(plan(open_checkpoint(llama), recipe, CPU)).grids
    assert grids == {4: recipe.grid, 8: LinearRecipe("w8a8", grid_of("w8a8", None, None)), 16: None}


@pytest.mark.parametrize("group_size", [64, -1])
@pytest.mark.parametrize(
    "bits, symmetric, other", [(4, False, True), (4, True, True), (8, False, False), (8, True, True)]
)
def test_the_other_width_has_the_same_groups(bits, symmetric, other, group_size, llama):
    scheme = {4: "w4a16", 8: "w8a16"}
    recipe = Recipe(scheme[bits], grid_of(scheme[bits], group_size, symmetric), "rtn", target_bits=6.0)
    grids = budget_of(plan(open_checkpoint(llama), recipe, CPU)).grids
    assert grids[bits] == recipe.grid and grids[16] is None
    assert grids[12 - bits] == LinearRecipe(scheme[12 - bits], grid_of(scheme[12 - bits], group_size, other))


def test_max_size_holds(llama, calib, tmp_path, capsys):
    flags = ["--calib", calib, "--seqlen", 64, "--eval-samples", 4, "--method", "rtn", "--model", llama]
    full = open_checkpoint(llama).num_bytes
    words = [*flags, "--out", tmp_path / "out", "--max-size", 0.6 * full / 1e9]
    assert cli.main([str(word) for word in words]) == 0
    left = 0.6 * full - open_checkpoint(tmp_path / "out").num_bytes
    assert 0 <= left < 32768 * (W8_BITS - W4_BITS) / 8  # the smallest Linears have no room to rise
    assert cli.main([str(word) for word in [*flags, "--out", tmp_path / "no", "--max-size", 1e-5]]) == 1
    assert "--max-size: expected from 0.000467" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="two budgets for one choice"):
        Recipe("w4a16", W4.spec, "awq", target_bits=5.0, max_size=1.0)


@pytest.mark.parametrize("group_size", [-1, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.5, 0.6, 0.7, 0.8, 0.9])
def test_max_size_holds_for_every_grid_and_dtype(share, dtype, group_size, make_checkpoint):
    """A scale per channel weighs more in a Linear of few inputs, and what stays in float32 has 32 bits."""
    source, spec = open_checkpoint(cached(make_checkpoint, dtype)), grid_of("w4a16", group_size, False)
    recipe = Recipe("w4a16", spec, "rtn", max_size=share * source.num_bytes / 1e9)
    job = plan(source, recipe, CPU)
    budget = budget_of(job)
    prices = {(number, width): 1 / width for number in range(len(budget.units)) for width in (4, 8)}
    found = spend(budget.units, prices, budget.grids, budget.bits, budget.settled)
    chosen = preflight(plan(source, replace(recipe, overrides=found.overrides), CPU))
    assert chosen.output_bytes <= share * source.num_bytes
    assert found.curve[-1].bits == pytest.approx(chosen.bits_per_weight)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--target-bits 4",
            "--target-bits: expected from 4.15625 (all Linears with an open width at their narrowest)",
        ),
        ("--target-bits 16", "to below 16 (all of them unchanged), got 16.0; choose a value between"),
        ("--target-bits nan", "--target-bits: expected a number above 0, got nan"),
        ("--max-size inf", "--max-size: expected a number above 0, got inf"),
        ("--max-size -1", "--max-size: expected a number above 0, got -1.0"),
        ("--max-size 1e-5", "--max-size: expected from 0.000467"),
        ("--max-size 1", " GB (all of them unchanged), got 1.0 GB; choose a value between"),
        ("--target-bits 6 --override *=w4a16", "--target-bits: every Linear is settled by an override"),
        ("--target-bits 6 --override *=w8a16", "--target-bits: every Linear is settled by an override"),
        (
            "--target-bits 6 --scheme w8a8",
            "--target-bits: expected a scheme with groups, got w8a8; use w4a8, or leave --scheme out",
        ),
        ("--target-bits 6 --eval-samples 0", "--target-bits: needs text to measure on"),
        ("--target-bits 6 --calib gone.txt", "--calib: no file 'gone.txt'"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_impossible_budget_is_refused_before_measuring(
    flags, message, dry, llama, calib, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bits, "measure", lambda *arguments: pytest.fail("measured"))
    monkeypatch.chdir(tmp_path)
    words = ["--model", llama, "--method", "rtn", "--calib", calib, "--seqlen", 64, "--eval-samples", 4]
    assert cli.main([*map(str, words), *flags.split(), *dry]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dry", [False, True])
def test_only_a_dry_run_accepts_a_taken_output_folder(dry, llama, calib, tmp_path, monkeypatch, capsys):
    """A dry run writes nothing; a real one refuses the folder before it measures anything."""
    if not dry:
        monkeypatch.setattr(bits, "measure", lambda *arguments: pytest.fail("measured"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    words = ["--model", llama, "--method", "rtn", "--calib", calib, "--seqlen", 64, "--eval-samples", 4]
    words += ["--target-bits", 6, "--out", tmp_path / "full", *(["--dry-run"] if dry else [])]
    assert cli.main([*map(str, words)]) == (0 if dry else 1)
    shown = capsys.readouterr()
    assert ("full: already there and not an empty folder" in shown.err) is not dry
    assert ("bits are still to be chosen" in shown.out) is dry
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert [path.read_text() for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_dry_run_says_what_is_open(llama, calib, capsys):
    words = ["--model", llama, "--calib", calib, "--seqlen", 64, "--n-samples", 4, "--bits", 8, "--dry-run"]
    assert cli.main([*map(str, words), "--target-bits", "6"]) == 0
    said = capsys.readouterr().out
    assert "bits are still to be chosen for 8 fused Linears: 4.125 to 6 bits per weight, scales" in said
    assert "of w8a16 g128 sym for all" in said
    assert cli.main([*map(str, words)]) == 0
    assert "to be chosen" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag, pattern", [("--target-bits", r"from ([\d.]+) \("), ("--max-size", r"from ([\d.]+) GB")]
)
@pytest.mark.parametrize("more", [[], ["--group-size", "-1"], ["--ignore", "layers.0.*"]])
def test_smallest_budget_named_by_the_error_works(
    flag, pattern, more, make_checkpoint, calib, tmp_path, capsys
):
    """The sizes have no exact decimal form: 96 inputs and an odd number of outputs."""
    sizes = {"intermediate_size": 224, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    model = make_checkpoint("LlamaForCausalLM", **sizes, head_dim=32)
    words = ["--model", model, "--calib", calib, "--seqlen", 64, "--eval-samples", 2, "--method", "rtn"]
    words = [str(word) for word in (*words, "--group-size", 32, *more, "--out", tmp_path / "out", flag)]
    assert cli.main([*words, "0.00001"]) == 1
    least = re.search(pattern, capsys.readouterr().err)[1]
    assert cli.main([*words, least]) == 0


@pytest.mark.parametrize(
    "budget, more",
    [
        (["--target-bits", 4.5], []),
        (["--target-bits", 7.25], ["--ignore", "layers.1.self_attn.o_proj"]),
        (["--target-bits", 9], ["--override", "layers.0.mlp.*=w8a16", "--head-bits", 8]),
        (["--max-size", 0.0006], ["--ignore", "down_proj"]),
        (["--target-bits", 6], ["--scheme", "w4a8"]),
        ([], ["--ignore", "layers.0.mlp.*"]),
    ],
)
def test_a_flag_and_its_figure_count_the_same(budget, more, llama, calib, tmp_path, capsys):
    """The report's bits and bytes keep the budget, and equal those written and those of the preflight."""
    words = ["--model", llama, "--calib", calib, "--seqlen", 64, "--eval-samples", 2, "--method", "rtn"]
    words = [str(word) for word in (*words, *budget, *more, "--out", tmp_path / "out")]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    report = json.loads((tmp_path / "out/qrt_report.json").read_text())
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert report["stored_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    counted = re.compile("_proj[.]weight(_packed|_scale|_zero_point|)$")
    taken = sum(tensor.nbytes for name, tensor in tensors.items() if counted.search(name))
    source = load_file(llama / "model.safetensors")
    weights = sum(tensor.numel() for name, tensor in source.items() if "_proj" in name)
    assert report["bits_per_weight"] == round(8 * taken / weights, 4)
    if "--target-bits" in budget:
        assert report["bits_per_weight"] <= budget[1]
    if "--max-size" in budget:
        assert report["stored_bytes"] <= budget[1] * 1e9
    figure = f"{8 * taken / weights:.3f} bits per weight, scales and zero points included"
    assert (
        figure in shown.out
        and figure in shown.err
        and figure in (tmp_path / "out/qrt_report.html").read_text()
    )
    if not budget:
        assert cli.main([*words[:-1], str(tmp_path / "dry"), "--dry-run"]) == 0
        assert f"output {report['stored_bytes'] / 1e9:.2f} GB ({figure}" in capsys.readouterr().out


def test_a_budget_end_to_end(llama, calib, tmp_path, capsys):
    hard = make_hard(llama, tmp_path / "hard", Profile(64.0, 12, heads=True))
    flags = ["--calib", calib, "--n-samples", 4, "--seqlen", 64, "--eval-samples", 1, "--method", "gptq"]
    words = ["--model", hard, "--target-bits", 5.5, *flags, "--out", tmp_path / "out"]
    assert cli.main([str(word) for word in words]) == 0
    report = json.loads((tmp_path / "out/qrt_report.json").read_text())
    assert 5 < report["bits_per_weight"] <= 5.5 and len(report["curve"]) > 1
    assert [point["kl"] for point in report["curve"]] == sorted(
        (p["kl"] for p in report["curve"]), reverse=True
    )
    read = open_checkpoint(tmp_path / "out")
    kinds = {name: read.linear(name)[0] for name in report["linears"]["w4a16 g128 asym"]}
    assert set(kinds.values()) == {"w4a16"} and "w8a16 g128 sym" in report["linears"] | {"w8a16 g128 asym": 0}
    ids = torch.arange(40)[None]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits.isfinite().all()
