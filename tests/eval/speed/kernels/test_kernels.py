"""Test `qrt-eval kernels`: every cell is measured and counted, even without a GPU."""

import json
from functools import cache

import pytest
import torch

from errors import assert_error, assert_names
from qrt.kernels import tuned
from qrt.kernels.linear.int8 import plans as int8_plans
from qrt.kernels.linear.tiles import plans as tile_plans
from qrt.quant.digits import MOST_TOKENS
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_eval.cli import main
from qrt_eval.inputs import shapes
from qrt_eval.speed.kernels import all_reduce, experts, run, timer, trials, tune
from qrt_eval.speed.kernels.linear import products, random_linear
from qrt_eval.speed.kernels.timer import COLD_BYTES, Rates, copies, microseconds
from result_schema import checked

SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1e4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    """Time two copies of the operands, not as many as are larger than a cache; measure this machine once."""
    monkeypatch.setattr(timer, "MAX_COPIES", 2)
    monkeypatch.setattr(run, "measure_rates", _rates)


@cache
def _rates(device):
    return timer.measure_rates(device)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "small", ("LlamaForCausalLM", SMALL))


def test_every_operator_has_rows(small, quick, tmp_path, capsys):
    out = tmp_path / "kernels.json"
    words = "kernels --shape small --tokens 1 8 --decode 2x64 --prefill 32x0 32x32 --compare --json"
    assert main([*words.split(), str(out)]) == 0
    result = checked(out)
    cells = {(row["op"], row["what"], row["at"]): row for row in result["kernels"]}
    assert len(cells) == len(result["kernels"]) and {key[0] for key in cells} == {
        "layer", "chain", "linear", "decode", "prefill", "kv_write", "rmsnorm", "silu_mul", "sample",
    }  # fmt: skip
    for row in cells.values():
        assert row["us"] > 0 and row["floor_us"] > 0 and row["num_bytes"] > 0
    for own in (
        ("linear", "w4a8 sum", "M=8"),
        ("chain", "w4a8", "M=8"),
        ("layer", "w4a8, KV int4", "2 x 64"),
    ):
        assert cells[own]["ours"]
    # 128 -> 2 * 256 in int4: codes, a scale and a zero word per group of 128, x and y in fp32
    gate_up = cells["linear", "w4a16 gate_up", "M=8"]
    assert gate_up["flops"] == 2 * 8 * 128 * 512
    assert cells["linear", "w4a16 sum", "M=8"]["us"] == pytest.approx(
        sum(cells["linear", f"w4a16 {name}", "M=8"]["us"] for name in ("qkv", "o", "gate_up", "down"))
    )
    # a layer's products, and K/V of 64 tokens for each of 2 requests; bf16 is the row to compare with
    layer = cells["layer", "w4a16, KV int4", "2 x 64"]
    assert layer["num_bytes"] > cells["decode", "int4", "2 x 64"]["num_bytes"] and layer["ours"]
    products = sum(
        cells["linear", f"w4a16 {name}", "M=1"]["flops"] for name in ("qkv", "o", "gate_up", "down")
    )
    assert layer["flops"] == 2 * products + cells["decode", "int4", "2 x 64"]["flops"]
    chain = cells["chain", "w4a16", "M=8"]
    assert chain["flops"] == 8 * products and chain["num_bytes"] < layer["num_bytes"] and chain["ours"]
    # 2 x 64 tokens, 2 heads of K and V: 64 codes in 4 bits and two fp16 scales each
    assert cells["decode", "int4", "2 x 64"]["num_bytes"] == 2 * 64 * 2 * 2 * (64 // 2 + 4)
    baseline = {at for op, what, at in cells if (op, what) == ("prefill", "torch SDPA, contiguous")}
    assert baseline == {"32 + 0", "32 + 32"}
    assert "linear" in capsys.readouterr().out


MIXTURE = SMALL | {
    "num_attention_heads": 2, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip


def test_experts_of_a_mixture_have_rows(quick, monkeypatch, tmp_path):
    monkeypatch.setitem(shapes.SHAPES, "small-moe", ("Qwen3MoeForCausalLM", MIXTURE))
    out = tmp_path / "kernels.json"
    words = "kernels --shape small-moe --op experts --tokens 1 3 --json"
    assert main([*words.split(), str(out)]) == 0
    cells = {(row["what"], row["at"]): row for row in checked(out)["kernels"]}
    names = {"route", "fp16 by torch", *WEIGHT_SCHEMES}
    assert set(cells) == {(name, at) for name in names for at in ("M=1", "M=3")}
    for (name, _), row in cells.items():
        assert row["us"] > 0 and row["floor_us"] > 0 and row["ours"] == (name != "fp16 by torch")
    one = cells["fp16", "M=1"]
    assert one["flops"] == 2 * 6 * 128 * 64
    assert one["num_bytes"] == 2 * 3 * 128 * 64 * 4 + 2 * 128 * 4  # two experts in fp32, x and y
    assert one["num_bytes"] < cells["fp16", "M=3"]["num_bytes"] <= 4 * one["num_bytes"]


def test_explain_names_a_kernel_for_experts(monkeypatch, capsys):
    config = MIXTURE | {"hidden_size": 256, "moe_intermediate_size": 128}
    monkeypatch.setitem(shapes.SHAPES, "small-moe", ("Qwen3MoeForCausalLM", config))
    assert main(["kernels", "--explain", "--shape", "small-moe", "--tokens", "1", "8"]) == 0
    out = capsys.readouterr().out
    for words in ("expert gate_up", "expert down", "256 x 256", "128 x 256", "One expert follows"):
        assert words in out, words


@pytest.mark.parametrize("on_input", [False, True])
def test_experts_by_torch_compute_the_same(on_input):
    x, weights = torch.randn(9, 32), torch.rand(9, 2)
    gate_up, down = torch.randn(4, 2 * 48, 32), torch.randn(4, 32, 48)
    biases = torch.randn(4, 2 * 48), torch.randn(4, 32)
    chosen = experts.choices(4, 2, 9, 1)[0]
    args = x, chosen, weights, [gate_up], biases[0], [down], biases[1], "fp16", "silu", on_input
    torch.testing.assert_close(experts.by_torch(*args), experts.experts(*args), rtol=1e-4, atol=1e-4)


def test_one_token_chooses_other_experts_in_each_call():
    found = torch.cat(experts.choices(16, 4, 1, 8))
    assert found[:4].unique().numel() == found[4:].unique().numel() == 16
    assert torch.equal(found[:4], found[4:])


def test_explain_names_a_kernel_for_every_product_and_scheme(small, capsys):
    """No row is timed."""
    assert main(["kernels", "--explain", "--shape", "small", "--tokens", "1", "8"]) == 0
    out = capsys.readouterr().out
    for scheme in WEIGHT_SCHEMES:
        assert f"small in {scheme}, on " in out
    for words in ("qkv of layers 0 to 1", "128 x 512", "256 x 128", "head", "1 to 8", "multiplies"):
        assert words in out, words


def test_explain_takes_a_checkpoint(capsys):
    assert main(["kernels", "--explain", "--model", "tiny"]) == 0
    captured = capsys.readouterr()
    assert "gate_up of layers 0 to 5" in captured.out and "head" in captured.out
    assert "dummy" not in captured.err


@pytest.mark.parametrize("words, named", [
    (["--explain", "--op", "linear"], "--op"), (["--explain", "--compare"], "--compare"),
    (["--explain", "--json", "kernels.json"], "--json"), (["--model", "tiny"], "--model"),
    (["--explain", "--tune", "llama-3-8b"], "--tune"),
])  # fmt: skip
def test_flags_that_do_not_go_with_explain_are_refused(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["kernels", *words])
    except SystemExit as error:
        code = error.code
    assert code in (1, 2)
    assert_error(capsys.readouterr().err, named, "--explain")


def test_time_is_of_one_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clock = [0.0]
    monkeypatch.setattr(timer.time, "perf_counter", lambda: clock[0])

    def work(seconds):
        clock[0] += seconds

    assert microseconds(work, [(0.01,), (0.02,), (0.03,)]) == pytest.approx(2e4)


def test_operands_do_not_fit_the_cache_together():
    for size in (1000, 10 << 20, 200 << 20):
        assert copies(size) >= 2 and (copies(size) * size >= COLD_BYTES or copies(size) == 64)


def test_floor_is_the_slower_of_bytes_and_work():
    rates = Rates(bytes_per_s=1e12, flops_per_s=1e14, int8_ops_per_s=2e14)
    assert rates.floor_us(1e6) == pytest.approx(1) and rates.floor_us(1e6, 1e9) == pytest.approx(10)
    assert rates.floor_us(1e6, 1e9, int8=True) == pytest.approx(5)


def test_tuning_without_a_gpu_is_refused(capsys):
    if not torch.cuda.is_available():
        assert main(["kernels", "--tune", "llama-3-8b"]) == 1
        assert_error(capsys.readouterr().err, "--tune", "GPU")


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_have_the_published_sizes(name):
    config = shapes.shape(name)
    sizes = sum(k * n for k, n in products(config).values())
    if (experts := config.experts) is not None:
        sizes += experts.count * 3 * config.hidden_size * experts.width
    tables = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    billions = (config.num_layers * sizes + tables) / 1e9
    published = {"llama-3.2-1b": 1.24, "llama-3-8b": 8.03, "llama-3-70b": 70.6, "mistral-7b": 7.25,
                 "qwen3-0.6b": 0.6, "qwen3-8b": 8.19, "qwen3-32b": 32.8, "qwen2.5-7b": 7.62,
                 "mistral-small-24b": 23.6, "phi-4": 14.7, "glm-4-9b": 9.4, "gemma-2-9b": 9.24,
                 "gemma-3-27b": 27.0, "qwen3-30b-a3b": 30.5, "mixtral-8x7b": 46.7,
                 "gpt-oss-20b": 20.9}  # fmt: skip
    assert billions == pytest.approx(published[name], rel=0.01)
    assert tuple(reach.window for reach in config.reaches) == {
        "gemma-2-9b": (4096, 0),
        "gemma-3-27b": (1024, 0),
        "gpt-oss-20b": (128, 0),
    }.get(name, (0,))


def test_every_key_has_a_trial_and_none_is_tried_twice():
    for k, n in ((4096, 6144), (14336, 4096), (1024, 3072), (28672, 8192)):
        todo = list(trials.trials(k, n))
        assert len(todo) == len(set(todo)) and len({trial.key for trial in todo}) == 2 * 17 + 15 + 8
        for trial in todo:
            if trial.scheme == "w8a8":  # the launcher splits as the plan says
                plan, inputs = trial.plan, getattr(trial.plan, "inputs", 128)
                assert -(-k // (-(-k // plan.splits // inputs) * inputs)) == plan.splits


def test_plans_for_int8_tokens_in_tiles_are_those_tried():
    """The splits of gate and up are one: more would leave act_mul to another kernel."""
    arch = shapes.shape("llama-3-8b")
    todo = [trial for trial in trials.pending([arch], {}) if trial.scheme == "w4a8"]
    table = json.loads(tuned.path("NVIDIA H200").read_text())
    tried = {(trial.key, tuple(trial.entry)) for trial in todo}
    assert {(key, tuple(table[key])) for key, _ in tried} <= tried
    assert {key for key, _ in tried} == {
        tile_plans.int8_tuning_key(k, n, width)
        for k, n in products(arch).values()
        for width in trials.INT8_TILES_WIDTHS
    }
    for trial in todo:
        plan, wide = trial.plan, tile_plans.width_of(trial.width)
        assert plan.tokens <= min(wide, 256) and 1 <= plan.splits <= (1 if trial.gated else 4)
        assert plan.tokens <= 128 or plan.splits == 1 and not plan.turns, "two products an unpacked plane"
        assert sum(tile_plans.registers(plan)) > 0 and plan.blocks % plan.group_blocks == 0


@pytest.mark.parametrize("scheme, gated, multiply", [
    ("w4a8", False, tune.linear_int8), ("w4a8", True, tune.linear_act_int8),
    ("w8a8", False, tune.linear_int8), ("w8a8", True, tune.linear_act_int8),
    ("w4a16", False, tune.linear), ("w4a16", True, tune.linear_act),
])  # fmt: skip
def test_trials_time_what_a_layer_calls(scheme, gated, multiply):
    """Schemes of int8 tokens get codes; each call has tensors that keep no plan."""
    weight = random_linear(scheme, 256, 128, torch.device("cpu"))
    operator, (args, _) = tune._calls(trials.Trial(scheme, 256, 128, 32, None, gated), [weight, weight])
    assert operator is multiply and isinstance(args[2 if "a8" in scheme else 1], list)
    y = operator(*args)
    wide = 64 if gated else 128
    assert (y[0] if isinstance(y, tuple) else y).shape == (32, wide)


def test_tuning_all_shapes_takes_minutes():
    """A measurement takes 30 ms, a kernel 2 s on one of 16 cores; the file already has some."""
    todo = trials.pending([shapes.shape(name) for name in shapes.SHAPES], {})
    assert len(todo) * 0.03 + len({trial.binary for trial in todo}) * 2 / 16 < 64 * len(shapes.SHAPES)


def test_interrupted_tuning_resumes(small, monkeypatch, tmp_path):
    """The file holds the winners of a scheme before the next scheme is measured.

    Entries of the file stay, unless their plan is no longer tried. Of the plans that are fastest alone, the
    one that makes a layer fastest wins.
    """
    table, file, cut = {"int8 128x512 16 wide": ["block", 16, 32, 256, 1, 4, 4]}, tmp_path / "gpu.json", [3]
    table["tiles 128x512 8 bits 128 wide"] = ["gone", 128, 1, 1, 4]
    file.write_text(json.dumps(table))

    def size(entry):
        return sum(entry[1:])

    def measure(trial, weights, table):
        if not weights:
            raise KeyboardInterrupt
        return 1.0 + size(trial.entry)

    def layer(scheme, width):
        return 0.99 ** sum(size(entry) for entry in table.values())

    def copies(weight):
        cut[0] -= 1
        return [weight] if cut[0] else []

    fakes = {"_compile": len, "_try": measure, "layer_us": layer, "cold_copies": copies}
    fakes |= dict.fromkeys(("random_linear", "layers", "decode_step"), lambda *of: of)
    for name, fake in fakes.items():
        monkeypatch.setattr(tune, name, fake)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "gpu")
    monkeypatch.setattr(tuned, "configs", lambda device: table)
    monkeypatch.setattr(tuned, "path", lambda name: file)

    todo = trials.pending([shapes.shape("small")], table)
    with pytest.raises(KeyboardInterrupt):
        tune.tune([shapes.shape("small")], torch.device("cuda"))
    assert json.loads(file.read_text()) == table and len(table) == 1 + 2 * 17
    tune.tune([shapes.shape("small")], torch.device("cuda"))
    written = json.loads(file.read_text())
    assert written.pop("int8 128x512 16 wide") == ["block", 16, 32, 256, 1, 4, 4]
    tried = {key: sorted(size(t.entry) for t in todo if t.key == key) for key in {t.key for t in todo}}
    for key, entry in written.items():
        width = int(key.split()[-2])
        in_layer = width in tune.LAYER_WIDTHS and (" 4 bits" not in key or width > MOST_TOKENS)
        assert size(entry) == (tried[key][: tune.LAYER_PLANS][-1] if in_layer else tried[key][0]), key
    assert written.keys() == tried.keys()
    assert trials.pending([shapes.shape("small")], table) == []


def test_tuned_files_are_complete():
    for file in tuned.FOLDER.glob("*.json"):
        table = json.loads(file.read_text())
        assert table
        for key, (kind, *sizes) in table.items():
            known = {"tiles": {**tile_plans.PLANS, "dequantize": list}, "int8": int8_plans.PLANS}
            plans = known["tiles" if "tiles" in key else "int8"]
            named = dict(zip(getattr(plans[kind], "_fields", ()), sizes, strict=True))
            assert named.pop("persistent", 0) in (0, 1, 2), key
            assert all(isinstance(n, int) and n > 0 for n in named.values()), key
    assert tuned.path("NVIDIA H200").name == "nvidia_h200.json"
    assert tuned.configs(torch.device("cpu")) == {}


@pytest.mark.parametrize("name, chip, like", [
    ("NVIDIA H100 80GB HBM3", ((9, 0), 132), "NVIDIA H200"), ("NVIDIA H100 PCIe", ((9, 0), 114), None),
    ("NVIDIA A100-SXM4-80GB", ((8, 0), 108), None),
])  # fmt: skip
def test_unmeasured_gpu_uses_a_similar_gpus_plans(monkeypatch, caplog, name, chip, like):
    """It takes those of a GPU with the same chip, or none, and says so once."""
    caplog.set_level("INFO", logger=tuned.__name__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip[0])
    monkeypatch.setattr(tuned, "multiprocessors", lambda device: chip[1])
    for function in (tuned.configs, tuned._read):
        monkeypatch.setattr(tuned, function.__name__, function.__wrapped__)
    found = tuned.configs(torch.device("cuda"))
    assert found == (json.loads(tuned.path(like).read_text()) if like else {})
    (said,) = caplog.messages
    assert_names(said, name, like or "rules of thumb", "qrt-eval kernels --tune")


def test_all_reduce_needs_two_gpus(capsys):
    assert not list(all_reduce.rows(None, (1,), None, torch.device("cpu")))
    assert capsys.readouterr().err == "--op all-reduce: left out: expected two GPUs or more, got 0\n"
