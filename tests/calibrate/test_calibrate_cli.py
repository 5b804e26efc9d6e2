"""Every wrong input is one line that names the thing and the remedy; nothing is left behind."""

import hashlib
import json
import re
import runpy
import sys

import pytest
import torch
from outliers import Profile, make_hard

import qrt
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.compressed_tensors import target_of
from qrt.text.tokenizer import Tokenizer
from qrt_calibrate import cli, hub, pipeline
from qrt_calibrate.recipe.recipe import grid_of
from qrt_calibrate.rounding import search
from qrt_calibrate.steps import scales
from qrt_calibrate.text import text
from tiny_models import altered


@pytest.fixture
def run(calib, tmp_path, monkeypatch, capsys):
    """run("--bits", "4", model=...) -> exit code and stderr; runs in an empty folder, with little text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "GRID", 4)

    def call(*flags, model, text=calib):
        cut = ["--n-samples", "4", "--seqlen", "64", "--eval-samples", "1"]
        words = ["--model", str(model), "--calib", str(text), *cut, *flags]
        try:
            code = cli.main(words)
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr()

    return call


def test_default_output_and_summary(run, llama, calib, tmp_path):
    code, shown = run("--bits", "4", "--ignore", "layers.1.*", model=llama)
    assert code == 0
    out = tmp_path / f"{llama.name}-w4"
    assert f"written to {out.name}" in shown.out and "7 of 14 Linears quantized, 10.07" in shown.out
    assert "model.layers.0" in shown.out and "Calibrating" in shown.err
    config = open_checkpoint(out).config["quantization_config"]
    ignored = [
        p for i in range(2) for p in awq_projections() if target_of(f"model.layers.{i}.{p}", config["ignore"])
    ]
    assert config["ignore"][0] == "lm_head" and ignored == list(awq_projections())
    weights = config["config_groups"]["group_0"]["weights"]
    assert weights == {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 128,
    }
    text = {"text": "calib.txt", "sha256": hashlib.sha256(calib.read_bytes()).hexdigest()}
    calibration = {**text, "n_samples": 4, "seqlen": 64, "seed": 0}
    recipe = {"version": qrt.__version__, "scheme": "w4a16", "method": "awq-yaqa", "damping": 0.1}
    assert config["qrt"] == {**recipe, "calibration": calibration}
    report = json.loads((out / "qrt_report.json").read_text())
    counts = {"rows": 2, "rows_looked_at": 2, "rows_left_out": {}, "files_left_out": {}}
    assert report["calibration"] == calibration | counts
    assert report["grids"] == {"w4a16 g128 asym": 7, "fp16": 7}
    assert report["cost"]["tokens"] == 63 and report["cost"]["kl"] > 0 and len(report["layers"]) == 2
    assert f"KL {report['cost']['kl']:.5f}" in shown.out
    page = (out / "qrt_report.html").read_text()
    assert "model.layers.1" in page and f"{report['cost']['kl']:.6f}" in page and "http" not in page


def awq_projections():
    attention = [f"self_attn.{p}_proj" for p in "qkvo"]
    return [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.mark.parametrize(
    "flags, folder, scheme",
    [
        (["--bits", "8"], "w8", {"num_bits": 8, "symmetric": True, "strategy": "group", "group_size": 128}),
        (
            ["--bits", "4", "--sym", "--group-size", "64"],
            "w4",
            {"num_bits": 4, "symmetric": True, "group_size": 64},
        ),
        (["--scheme", "w8a8"], "w8a8", {"num_bits": 8, "symmetric": True, "strategy": "channel"}),
        (["--scheme", "w8a8", "--bits", "8"], "w8a8", {"num_bits": 8}),
        (
            ["--scheme", "w4a8", "--sym", "--group-size", "32"],
            "w4a8",
            {"num_bits": 4, "symmetric": True, "group_size": 32},
        ),
    ],
)
def test_grids(run, llama, tmp_path, flags, folder, scheme):
    rtn = ["--method", "rtn", "--eval-samples", "0"]  # reads no text
    code, shown = run(*flags, *rtn, "--out", folder, model=llama, text="no such file.txt")
    assert code == 0, shown.err
    group = open_checkpoint(tmp_path / folder).config["quantization_config"]["config_groups"]["group_0"]
    assert scheme.items() <= group["weights"].items()
    assert ("input_activations" in group) == folder.endswith("a8")


def test_round_to_nearest_reads_text_only_to_measure(llama, calib, tmp_path, monkeypatch, capsys):
    read = []
    monkeypatch.setattr(text, "Tokenizer", lambda folder: read.append(folder) or Tokenizer(folder))
    words = ["--model", str(llama), "--method", "rtn", "--seqlen", "64", "--calib"]

    def report(name, *flags):
        code = cli.main([*words, *map(str, flags), "--out", str(tmp_path / name)])
        assert code == 0, capsys.readouterr().err
        return json.loads((tmp_path / name / "qrt_report.json").read_text())

    without = report("without", "no such file.txt")
    assert not read and without["cost"] is None and without["calibration"] is None
    note = "--calib is not read: --method rtn needs no text; --eval-samples N measures"
    assert note in capsys.readouterr().err and any(note in finding for finding in without["findings"])
    measured = report("measured", calib, "--eval-samples", 2)
    assert len(read) == 1 and measured["cost"]["tokens"] == 2 * 63
    assert note not in capsys.readouterr().err
    assert report("budget", calib, "--target-bits", 6)["cost"]["tokens"] == 8 * 63
    assert qrt.calibrate(llama, tmp_path / "python", method="rtn").cost is None
    assert len(read) == 2


def test_figures_of_a_table_in_a_pipe_are_whole(run, llama):
    code, shown = run("--scheme", "w8a8", model=llama)
    assert code == 0 and "damping" in shown.out and "…" not in shown.out


@pytest.mark.parametrize(
    "flags, code, message",
    [
        (["--bts", "4"], 2, "error: unknown flag --bts; did you mean '--bits'? (see qrt-calibrate --help)"),
        (["--kv", "int8"], 2, "error: unknown flag --kv"),
        (["--bits", "3"], 2, "argument --bits: invalid choice: 3"),
        (["--head-bits", "4"], 2, "argument --head-bits: invalid choice: 4"),
        (["--method", "gtpq"], 2, "argument --method: invalid choice: 'gtpq'"),
        (["--sym", "--asym"], 2, "argument --asym: not allowed with argument --sym"),
        (["--bits", "4", "--scheme", "w8a8"], 1, "--bits 4 contradicts --scheme w8a8; give one of the two"),
        (
            ["--scheme", "w8a8", "--group-size", "64"],
            1,
            "--group-size: w8a8 has one scale per output channel",
        ),
        (["--scheme", "w8a8", "--asym"], 1, "--asym: w8a8"),
        (
            ["--method", "smoothquant"],
            1,
            "--method smoothquant: expected a scheme that rounds activations, got w4a16",
        ),
        (
            ["--override", "o_proj"],
            1,
            "override: expected PATTERN=SCHEME or {match: ..., scheme: ...}, got 'o_proj'",
        ),
        (["--override", "o_proj=w2a16"], 1, "scheme: expected one of w8a16, w4a16, w8a8, w4a8, got 'w2a16'"),
        (["--override", "nothing=w8a16"], 1, "an override 'nothing' matches no Linear"),
        (["--override", "q_proj=w8a16"], 1, "engines run model.layers.0.self_attn.qkv_proj as one Linear"),
        (["--damp", "0"], 1, "--damp: expected a number above 0 and at most 1, got 0.0"),
        (["--recipe", "gone.yaml"], 1, "--recipe: gone.yaml cannot be read"),
        (
            ["--group-size", "96"],
            1,
            "model.layers.0.self_attn.q_proj: group size 96 does not divide 128 input features; use a group "
            "size that does (e.g. 128) or leave the layer unquantized with --ignore",
        ),
        (
            ["--group-size", "0"],
            1,
            "--group-size: expected a positive number, or -1 for one scale per channel",
        ),
        (
            ["--group-size", "16"],
            1,
            "groups of a multiple of 32 or one per channel, got 4-bit codes in groups of 16;",
        ),
        (["--ignore", "nothing"], 1, "--ignore 'nothing' matches no Linear"),
        (["--ignore", "k_proj"], 1, "engines run model.layers.0.self_attn.qkv_proj as one Linear"),
        (["--ignore", "*"], 1, "nothing is left to quantize"),
        (["--calib", "ultrachat.txt"], 1, "--calib: no file 'ultrachat.txt'"),
        (["--n-samples", "0"], 1, "--n-samples: expected at least 1, got 0"),
        (["--n-samples", "100000"], 1, "calibration text: "),
        (["--seed", "-1"], 1, "--seed: expected 0 to 2^63 - 1, got -1"),
        (["--seqlen", "513"], 1, "--seqlen: expected at most the model's 512, got 513"),
        (["--device", "gpu"], 1, "cuda:0,cuda:2 or cpu, got 'gpu'"),
        (["--out", "full"], 1, "full: already there and not an empty folder"),
    ],
)
def test_wrong_flags(run, llama, tmp_path, flags, code, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    got, shown = run(*flags, model=llama)
    assert (got, shown.out) == (code, "")
    assert message in shown.err and shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cli.py", "--bts", "4"])
    monkeypatch.delitem(sys.modules, "qrt_calibrate.cli")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("qrt_calibrate.cli", run_name="__main__")
    assert "did you mean '--bits'? (see qrt-calibrate --help)" in capsys.readouterr().err


def test_linear_with_indivisible_groups_can_be_ignored(run, make_checkpoint, tmp_path):
    model = make_checkpoint("LlamaForCausalLM", intermediate_size=320)
    flags = ("--bits", "4", "--group-size", "128", "--out", "out")
    code, shown = run(*flags, model=model)
    assert code == 1 and "mlp.down_proj: group size 128 does not divide 320" in shown.err
    code, shown = run(*flags, "--ignore", "down_proj", model=model)
    assert code == 0 and "12 of 14 Linears quantized" in shown.out, shown.err


def test_suggested_group_size_divides_every_linear(run, make_checkpoint, tmp_path):
    model = make_checkpoint("LlamaForCausalLM", hidden_size=384, intermediate_size=352)
    code, shown = run("--group-size", "256", "--out", "out", model=model)
    assert code == 1 and "q_proj: group size 256 does not divide 384" in shown.err
    size = re.search(r"e\.g\. (\d+)", shown.err)[1]
    flags = ("--method", "rtn", "--eval-samples", "0", "--out", "out")
    code, shown = run("--group-size", size, *flags, model=model)
    assert code == 0 and size == "32", shown.err


def edit_config(source, out, **changes):
    copy = altered(source, out, lambda tensors: None)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


def test_wrong_checkpoints(run, llama, tmp_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    last = "model.layers.1.mlp.down_proj.weight"
    bias = "model.layers.1.mlp.down_proj.bias"
    norm = "model.layers.0.input_layernorm.weight"
    cases = {
        folder / "missing": "missing: no such folder",
        edit_config(
            llama, folder / "arch", architectures=["GPT9LMHeadModel"]
        ): "unknown architecture 'GPT9LMH",
        edit_config(
            llama, folder / "none", architectures=None, model_type=""
        ): "config.json: architectures: expected a list of one name, e.g. 'LlamaForCausalLM', got None",
        edit_config(llama, folder / "dtype", dtype="float7"): "bfloat16 or float32, got 'float7'",
        edit_config(llama, folder / "double", dtype="float64"): "bfloat16 or float32, got 'float64'",
        altered(llama, folder / "nan", lambda t: t[last].view(-1)[7:8].fill_(torch.nan)): f"{last} holds NaN",
        altered(
            llama, folder / "inf", lambda t: t["lm_head.weight"][3].fill_(torch.inf)
        ): "lm_head.weight holds",
        altered(
            llama, folder / "row", lambda t: t["model.embed_tokens.weight"][-1].fill_(torch.nan)
        ): "embed_tokens.weight holds",
        altered(llama, folder / "gone", lambda t: t.pop(last)): f"no tensor '{last}'",
        altered(llama, folder / "norm", lambda t: t.pop(norm)): "1 missing that config.json asks for: "
        + norm.removesuffix(".weight"),
        altered(llama, folder / "head", lambda t: t.pop("lm_head.weight")): "asks for: lm_head; correct",
        edit_config(
            llama, folder / "fewer", num_hidden_layers=1
        ): "9 tensors that LlamaForCausalLM with this",
        altered(
            llama, folder / "bias", lambda t: t.update({bias: torch.ones(128)})
        ): f"not use: {bias}; correct",
        altered(
            llama, folder / "fine", lambda t: t.update({norm: t[norm].double()})
        ): f"{norm}: expected torch.float16 or",
        edit_config(
            llama, folder / "vocab", vocab_size=500
        ): "embed_tokens.weight: expected shape [500, 128], as config.json says, got [512, 128]; correct",
        altered(
            llama, folder / "short", lambda t: t.update({"model.norm.weight": torch.ones(64)})
        ): "model.norm.weight: expected shape [128], as config.json says, got [64]",
    }
    for number, (model, message) in enumerate(cases.items()):
        code, shown = run("--bits", "4", "--out", f"out{number}", model=model)
        last_line = shown.err.splitlines()[-1]
        assert code == 1 and shown.out == "" and last_line.startswith("error: ") and message in last_line
    code, shown = run("--bits", "4", "--out", "early", "--method", "gptq", model=folder / "row")
    assert code == 1 and "embed_tokens.weight holds NaN" in shown.err
    assert not (tmp_path / "early.partial").exists(), "told before a layer is finished"
    code, shown = run("--bits", "8", "--method", "rtn", "--out", "once", model=llama)
    assert code == 0
    code, shown = run("--bits", "4", "--out", "twice", model="once")
    assert code == 1 and "already quantized; calibrate the unquantized model" in shown.err


def test_what_is_stored_finer_than_the_model_or_beside_it(run, make_checkpoint, tmp_path_factory):
    """fp32 norms of a bf16 model, and biases of zeros and tables that old tools store and nothing reads."""
    folder = tmp_path_factory.mktemp("finer")
    source = make_checkpoint("LlamaForCausalLM", dtype=torch.float32)
    source = make_hard(source, folder / "hard", Profile(64.0, 12, heads=True))  # every norm gets scales
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32),
        **{f"model.layers.1.{name}.bias": torch.zeros(128) for name in ("self_attn.o_proj", "mlp.down_proj")},
    }
    edit_config(altered(source, folder / "a", lambda t: t.update(extra)), folder / "b", dtype="bfloat16")
    for method in ("awq-gptq", "rtn"):
        out = folder / method
        flags = ("--bits", "4", "--ignore", "layers.1.mlp.*", "--method", method, "--out", str(out))
        code, shown = run(*flags, model=folder / "b")
        assert code == 0, shown.err
        written, linear = open_checkpoint(out), "model.layers.0.self_attn.q_proj"
        assert extra.keys() <= set(written.names())
        assert written.linear(linear)[1].scale.dtype == torch.bfloat16
    read, scales = open_checkpoint(folder / "awq-gptq"), set()
    for name in (name for name in read.names() if name.endswith("layernorm.weight")):
        ratio = open_checkpoint(source).tensor(name) / read.tensor(name)
        scales |= set(ratio.log2().tolist())
    assert len(scales) > 1 and all(scale == int(scale) for scale in scales)  # powers of two


@pytest.mark.parametrize("silent", [0, 1])
def test_a_layer_that_adds_nothing_has_figures(silent, run, llama, tmp_path, tmp_path_factory):
    """No error where nothing came before; behind another layer what it makes good of that one's."""

    def silence(tensors):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{silent}.{name}.weight"].zero_()

    model = altered(llama, tmp_path_factory.mktemp("silent") / "m", silence)
    code, shown = run("--bits", "4", "--out", "out", model=model)
    assert code == 0, shown.err
    report = json.loads((tmp_path / "out/qrt_report.json").read_text(), parse_constant=pytest.fail)
    errors = [layer["output error"] for layer in report["layers"]]
    assert errors[0] == 0 < errors[1] if silent == 0 else 0 < errors[1] < errors[0] < 1


def test_a_broken_pair_stops_the_run(run, llama, tmp_path, monkeypatch):
    """If a family's smoothing pairs are wrong, the first fold that changes the function ends it."""
    monkeypatch.setattr(scales.Pair, "spread", lambda self, scales: 2 * scales)
    candidates = scales.awq_candidates
    monkeypatch.setattr(scales, "awq_candidates", lambda *given: iter([2 * next(candidates(*given))]))
    code, shown = run("--bits", "4", model=llama)
    assert code == 1 and list(tmp_path.iterdir()) == []
    assert "model.layers.0: folding scales from input_layernorm into self_attn.q_proj" in shown.err


def test_recipes_from_a_file_and_flags_that_win(run, llama, tmp_path):
    (tmp_path / "r.yaml").write_text(
        "bits: 8\nmethod: rtn\nhead_bits: 8\noverride:\n"
        "  - {match: 're:.*layers[.]1[.]mlp', scheme: w4a16, group-size: 64, sym: true}\n"
        "  - layers.1.self_attn.o_proj=fp16\n"
    )
    code, shown = run("--recipe", "r.yaml", "--out", "out", "--head-bits", "16", model=llama)
    assert code == 0, shown.err
    read = open_checkpoint(tmp_path / "out")
    kinds = {name: read.linear(f"model.layers.1.{name}")[0] for name in awq_projections()}
    assert kinds["mlp.up_proj"] == "w4a16" and kinds["self_attn.o_proj"] == "fp16"
    assert kinds["self_attn.q_proj"] == "w8a16"
    config = read.config["quantization_config"]
    assert "head_bits" not in config["qrt"] and config["format"] == "pack-quantized"
    assert read.linear("model.layers.1.mlp.up_proj")[1].scale.shape[1] == 2
    for content, message in (
        ("bist: 4", "recipe: unknown key 'bist'; did you mean 'bits'?"),
        ("kv: int8", "recipe: unknown key 'kv'"),
        ("{asym: true, symmetric: false}", "recipe: 'symmetric' is the second key that sets symmetric; give"),
        ("asym: 1", "asym: expected bool, got 1"),
        ("sym: 1", "symmetric: expected bool, got 1"),
        ("bits: four", "bits: expected int, got 'four'"),
        ("- 4", "expected keys with values, got list"),
        ("a: [", "is not YAML"),
        ("ignore: lm_head", "ignore: expected a list, got 'lm_head'"),
        ("ignore: [5]", "ignore: expected text in the list, got 5"),
        ("rotations: []", "rotations: qrt rotates no weights (it gained nothing); remove this entry"),
    ):
        (tmp_path / "r.yaml").write_text(content)
        code, shown = run("--recipe", "r.yaml", "--out", "other", model=llama)
        assert code == 1 and message in shown.err


@pytest.mark.parametrize(
    "content, flags, wanted",
    [
        ("bits: 4", "--scheme w8a8", {"scheme": "w8a8"}),
        ("scheme: w8a8", "--bits 4", {"scheme": "w4a16"}),
        ("target_bits: 5", "--max-size 2", {"target_bits": None, "max_size": 2.0}),
        ("max-size: 2", "--target-bits 5", {"target_bits": 5.0, "max_size": None}),
        ("{group_size: 64, asym: true}", "--scheme w8a8", {"scheme": "w8a8", "zeros_asked": False}),
        ("{scheme: w8a8, method: smoothquant}", "--bits 8", {"method": "awq-gptq"}),
        ("{bits: 4, group_size: 64, asym: true}", "--bits 8", {"spec": grid_of("w8a16", 64, False)}),
        ("{bits: 4, method: rtn}", "--scheme w8a8", {"method": "rtn"}),
        ("{group_size: 64, sym: true}", "--scheme w4a8", {"spec": grid_of("w4a8", 64, True)}),
        ("{scheme: w8a8, method: smoothquant}", "--scheme w4a8", {"method": "smoothquant"}),
        ("{bits: 8, sym: false}", "", {"spec": grid_of("w8a16", None, False)}),
        ("{bits: 8, asym: true}", "--sym", {"spec": grid_of("w8a16", None, True)}),
        ("no-exact-fold: true", "", {"exact_folds": False}),
    ],
)
def test_flags_replace_all_entries_of_their_choice(content, flags, wanted, run, llama, tmp_path, monkeypatch):
    """What the file says of other choices stays, as far as the scheme of the flags can have it."""
    made = []
    monkeypatch.setattr(cli, "_work", lambda arguments, recipe: made.append(recipe))
    (tmp_path / "r.yaml").write_text(content)
    code, shown = run("--recipe", "r.yaml", *flags.split(), model=llama)
    assert code == 0, shown.err
    assert {key: getattr(made[0], key) for key in wanted} == wanted


def test_push_uploads_the_folder(run, llama, tmp_path, monkeypatch):
    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append((name, options["private"]))
            return f"https://huggingface.co/{name}"

        def upload_folder(self, repo_id, folder_path, commit_message):
            calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr(hub, "HfApi", Api)
    flags = ["--bits", "8", "--method", "rtn", "--push-to-hub", "me/model-w8", "--out", "out"]
    monkeypatch.setattr(hub, "get_token", lambda: None)
    for name, message in (("me/model-w8", "no token of the Hub"), ("a/b/c", "a/b/c: Repo id must be")):
        code, shown = run(*flags, "--push-to-hub", name, model=llama)
        assert code == 1 and f"error: --push-to-hub {name}" in shown.err and message in shown.err
        assert not list(tmp_path.iterdir()), "told before the work"
    monkeypatch.setattr(hub, "get_token", lambda: "token")
    code, shown = run(*flags, model=llama)
    assert code == 0 and calls[0] == ("me/model-w8", True)
    assert {"config.json", "model.safetensors", "qrt_report.json"} <= set(calls[1][1])
    assert "uploaded to https://huggingface.co/me/model-w8" in shown.err


def test_interrupted_run_continues_from_its_finished_layers(run, llama, tmp_path, monkeypatch):
    real = pipeline.read_layer

    def interrupted(checkpoint, layer):
        if layer.endswith(".1") and any(tmp_path.glob("out.partial/layer-*.json")):
            raise KeyboardInterrupt
        return real(checkpoint, layer)

    assert run("--bits", "4", "--out", "whole", model=llama)[0] == 0
    monkeypatch.setattr(pipeline, "read_layer", interrupted)
    code, shown = run("--bits", "4", "--out", "out", model=llama)
    assert code == 130 and shown.err.endswith("interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial", "whole"]
    monkeypatch.setattr(pipeline, "read_layer", real)
    code, shown = run("--bits", "4", "--sym", "--out", "out", model=llama)
    assert code == 1 and "out.partial: parts of another run (recipe differs); remove the folder" in shown.err
    assert run("--bits", "4", "--out", "out", model=llama)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
