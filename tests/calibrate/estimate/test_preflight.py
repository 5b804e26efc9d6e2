"""What is foreseen is what comes out, and where a result will not load is said."""

from dataclasses import replace

import pytest
import torch

from qrt.arch.read import read_arch
from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate import cli
from qrt_calibrate.estimate import duration
from qrt_calibrate.estimate import findings as findings_module
from qrt_calibrate.estimate.budget import budget_of
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import plan
from qrt_calibrate.pipeline import calibrate
from qrt_calibrate.recipe.recipe_file import recipe_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "entries",
    [{"bits": 4}, {"bits": 8}, {"scheme": "w8a8"}, {"bits": 4, "head_bits": 8}, {"scheme": "w4a8"}],
)
def test_output_has_the_expected_size(llama, tmp_path, entries, capsys):
    recipe = recipe_of({**entries, "method": "rtn", "eval_samples": 0})
    foreseen = preflight(plan(open_checkpoint(llama), recipe, CPU))
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in entries.items()]
    words = ["--model", str(llama), *flags, "--method", "rtn", "--eval-samples", "0"]
    assert cli.main([*words, "--dry-run", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert (
        "working memory" in said
        and "time: less than a minute on cpu" in said
        and not (tmp_path / "out").exists()
    )
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    written = open_checkpoint(tmp_path / "out").num_bytes
    assert foreseen.output_bytes == written


def test_untied_head_adds_its_bytes(make_checkpoint):
    checkpoint = open_checkpoint(make_checkpoint("LlamaForCausalLM", tie_word_embeddings=True))
    plain, tuned = (
        [preflight(plan(checkpoint, recipe_of({"bits": 4, "group_size": 64, "tune": steps, **head}), CPU))
         for head in ({}, {"head_bits": 8})]
        for steps in (0, 5)
    )  # fmt: skip
    size = 512 * 128 + 512 * 2 + 16  # codes, scales in bf16, the shape
    assert plain[1].output_bytes - plain[0].output_bytes == size
    assert tuned[1].tune_bytes - tuned[0].tune_bytes == 512 * 128 * 4
    assert "the head is the embedding and stays unquantized" in plain[0].findings
    assert not any("stays unquantized" in finding for finding in plain[1].findings)
    assert ["do not read a quantized head" in " ".join(each.findings) for each in plain] == [False, True]
    assert "the quantized head is stored beside the embedding and takes 0.00 GB" in plain[1].findings


def test_expected_time_is_parts_times_their_count(llama, make_checkpoint, monkeypatch):
    """Every part takes one second here; the Llama's stacks have 256, 128, 512 and 128 rows."""
    monkeypatch.setattr(duration, "_seconds", lambda work, beside: (work(), 1.0)[1])

    def expected(folder=llama, **entries):
        recipe = recipe_of({"bits": 4, "group_size": 64, "seqlen": 32, "n_samples": 4, **entries})
        job = plan(open_checkpoint(folder), recipe, CPU)
        return duration.expected_seconds(job, budget_of(job) if recipe.has_budget else None)

    stacks = [
        sum(open_checkpoint(llama).spec(f"model.layers.0.{part}.weight").shape[0] for part in parts)
        for _, parts in read_arch({"architectures": ["LlamaForCausalLM"]}, "model").fuse
    ]
    slices = sum(rows / min(rows, duration.SLICE) for rows in stacks)
    rounded = expected(method="rtn")
    assert rounded == pytest.approx(2 * slices)  # two layers
    for layer in ("0", "1"):  # left alone
        assert expected(method="rtn", override=[f"model.layers.{layer}.*=fp16"]) == pytest.approx(slices)
    assert expected(method="rtn", head_bits=8) - rounded == pytest.approx(512 / duration.SLICE)
    # exact and rounded through both layers, and the head, whose 512 rows are timed whole
    assert expected(method="rtn", eval_samples=3) - rounded == pytest.approx((2 * 2 + 1) * 3)
    gptq, awq, yaqa = (expected(method=name, eval_samples=0) for name in ("gptq", "awq-gptq", "awq-yaqa"))
    folds = len(read_arch({"architectures": ["LlamaForCausalLM"]}, "model").smooth)
    # 20 candidates of scales, a Hessian factorized again by each of four stacks, a check of each fold's block
    again = 2 * sum(columns**3 / min(columns, duration.ORDER) ** 3 for columns in (128, 256, 128, 256))
    assert gptq > 2 * rounded and awq - gptq == pytest.approx(20 * rounded + again + 2 * folds / 2 * 4)
    # four windows through both layers once forth, twice forth and back, with moments of outputs, and the head
    assert yaqa - awq > (2 * 3 + 1) * 4
    tuned = expected(method="awq-yaqa", eval_samples=0, tune=10)
    # ten steps: four windows drawn, forth twice and back, and one of the calibration text, forth and back
    assert tuned - yaqa == pytest.approx(2 * 10 * (6 * 4 + 3))
    bits = expected(method="rtn", eval_samples=3, target_bits=6) - expected(method="rtn", eval_samples=3)
    assert bits == pytest.approx(4 * 2 * 8 * (1.5 + 1))  # four windows, two widths of eight stacks, the head
    longer = make_checkpoint("LlamaForCausalLM", num_hidden_layers=4)
    head = 1 + 4  # of one window that evaluates, and of four gradients
    assert expected(longer, eval_samples=1) - head == pytest.approx(2 * (expected(eval_samples=1) - head))


def test_waiting_threads_do_not_count(monkeypatch):
    """Two of them take 9 s by the clock on the wall, one takes 2 s of CPU."""
    clocks = {"perf_counter": 0.0, "process_time": 0.0}
    for name in clocks:
        monkeypatch.setattr(duration.time, name, lambda name=name: clocks[name])

    def work():
        clocks["perf_counter"] += 9 if torch.get_num_threads() > 1 else 2
        clocks["process_time"] += 2

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert duration._seconds(work, torch.empty(0)) == 2
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0, "less than a minute"), (44, "less than a minute"), (50, "about a minute"),
        (12 * 60, "about 12 minutes"), (47 * 60, "about 45 minutes"), (85 * 60, "about 85 minutes"),
        (91 * 60, "about 1.5 hours"), (3 * 3600, "about 3 hours"), (20.4 * 3600, "about 20 hours"),
        (36 * 3600, "about 1.5 days"), (30 * 86400, "about 30 days"),
    ],
)  # fmt: skip
def test_durations_in_words(seconds, words):
    assert duration.in_words(seconds) == words


@pytest.mark.parametrize("entries", [{"bits": 4}, {"bits": 4, "symmetric": True}, {"bits": 8}])
def test_sizes_count_whole_words(entries, make_checkpoint, tmp_path):
    """Of features that do not fill 32 bits with codes or zero points."""
    sizes = {"intermediate_size": 90, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    folder = make_checkpoint("LlamaForCausalLM", **sizes, head_dim=20)
    recipe = recipe_of({"group_size": -1, "method": "rtn", "eval_samples": 0, **entries})
    report = calibrate(str(folder), recipe, tmp_path / "out", CPU)
    assert preflight(report.job).output_bytes == report.stored_bytes


def test_findings_name_gpu_counts_that_cannot_split(llama, monkeypatch):
    checkpoint = open_checkpoint(llama)  # 4 heads, 2 KV heads of 64; 256 inner features

    def findings(**entries):
        return preflight(plan(checkpoint, recipe_of({"method": "rtn", **entries}), CPU)).findings

    assert not any("GPUs (" in finding for finding in findings(bits=4, group_size=128)), "too small to split"
    size = preflight(plan(checkpoint, recipe_of({"bits": 4, "method": "rtn"}), CPU)).output_bytes
    monkeypatch.setattr(findings_module, "SHARE_BYTES", size // 8)
    w4 = findings(bits=4, group_size=128)
    assert any("over 4 GPUs (tensor parallelism): model.layers.0.self_attn.o_proj has 256 i" in f for f in w4)
    assert not any("over 2 GPUs" in finding for finding in w4)
    assert any("over 8 GPUs (tensor parallelism): 4 query and 2 KV heads" in finding for finding in w4)
    assert not any("over 4 GPUs" in finding for finding in findings(bits=4, group_size=64))
    monkeypatch.setattr(findings_module, "SHARE_BYTES", size // 4 - 1)
    assert not any("over 8 GPUs" in finding for finding in findings(bits=4, group_size=128))
    assert any("Hopper only" in finding for finding in findings(bits=8, symmetric=False))


def test_one_reason_for_several_gpu_counts_gives_one_note(make_checkpoint, monkeypatch):
    monkeypatch.setattr(findings_module, "SHARE_BYTES", 1)
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}
    folder = make_checkpoint("LlamaForCausalLM", **sizes)
    found = preflight(plan(open_checkpoint(folder), recipe_of({"bits": 4, "method": "rtn"}), CPU)).findings
    note = (
        "vLLM and SGLang cannot split it over 2 or 4 or 8 GPUs (tensor parallelism): 3 query and 3 KV heads"
    )
    assert [finding for finding in found if "GPUs" in finding] == [note]


def test_expected_memory_is_one_layer_and_the_windows(llama):
    recipe = recipe_of({"bits": 4, "n_samples": 7, "seqlen": 64, "eval_samples": 1})
    job = plan(open_checkpoint(llama), recipe, CPU)
    foreseen = preflight(job)
    assert foreseen.hidden_bytes == 2 * 8 * 64 * 128 * 4
    layer = sum(job.checkpoint.spec(n).num_bytes for n in job.checkpoint.names() if ".layers.0." in n) // 2
    # of down: Hessian, two shares of what the output lacks, and two matrices while it is factorized: more
    # than the factor and rounded weights (three fp32 copies and a byte); the layer in bf16, and its codes
    moments, factorizing = 4 * (256**2 + 2 * 128 * 256), 2 * 4 * 256**2
    outputs = 4 * 2 * 2 * (512**2 + 128**2)
    assert moments + factorizing > max(4 * 256**2 + 13 * 128 * 256, 4 * 128**2 + 13 * 512 * 128)
    assert foreseen.working_bytes == (8 + 3) * layer + moments + factorizing + outputs
    assert foreseen.gradient_bytes == 2 * 7 * 64 * 128 * 4
    gptq = preflight(replace(job, recipe=replace(job.recipe, method="awq-gptq")))
    assert (gptq.working_bytes, gptq.gradient_bytes) == ((8 + 3) * layer + moments + factorizing, 0)
    on_gpu = preflight(replace(job, devices=(torch.device("cuda"),)))
    assert on_gpu.working_bytes == (8 + 3) * layer + moments + 3 * 4 * 256**2 + outputs
    plain = replace(job, recipe=replace(job.recipe, method="rtn"))
    assert preflight(plain).working_bytes == (12 + 3) * layer  # exact, rounded, and its values as they decode
