"""Several devices share the windows: moments as on one device, results as good, bytes that repeat."""

import copy
import json

import pytest
import torch
from torch import nn

from qrt.errors import ConfigError
from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate import cli
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import plan
from qrt_calibrate.model.devices import at_once, devices_of, replica
from qrt_calibrate.model.executor import LayerExecutor, read_layer
from qrt_calibrate.model.streams import Streams
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.rounding.observe import Moments
from qrt_calibrate.steps.layer import quantize_layer
from qrt_calibrate.steps.written import Written

CPU = torch.device("cpu")
STAGES = ("q_proj", "o_proj", "gate_proj", "down_proj")


@pytest.mark.parametrize(
    "name, count, wanted",
    [
        (None, 0, ["cpu"]),
        (None, 1, ["cuda"]),
        (None, 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        (torch.device("cuda"), 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1"]),
        ("cuda:2, cuda:0", 3, ["cuda:2", "cuda:0"]),
        ("cpu,cpu", 0, ["cpu", "cpu"]),
    ],
)
def test_devices_are_those_named(name, count, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert [str(device) for device in devices_of(name)] == wanted


@pytest.mark.parametrize(
    "name, count, error",
    [
        ("gpu0", 0, "cuda:0,cuda:2 or cpu, got 'gpu0'"),
        ("mps", 0, "cuda:0,cuda:2 or cpu, got 'mps'"),
        ("cpu,meta", 0, "cuda:0,cuda:2 or cpu, got 'cpu,meta'"),
        ("cuda:0,cpu", 1, "expected devices of one kind, got 'cuda:0,cpu'"),
        ("cuda", 0, "expected cpu, .*, got 'cuda'"),
        ("cuda:0,cuda:2", 2, "expected cuda:0 to cuda:1, or cpu, .*, got 'cuda:0,cuda:2'"),
        ("cuda:1", 1, "expected cuda:0 or cpu, .*, got 'cuda:1'"),
    ],
)
def test_devices_that_are_not_there(name, count, error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=error):
        devices_of(name)


def test_a_replica_computes_the_same_and_has_its_own_hooks():
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    layer[0].register_forward_pre_hook(lambda module, arguments: (2 * arguments[0],))
    x = torch.randn(3, 4)
    layer(x)  # statistics are buffers
    layer.eval()
    other = replica(layer, CPU)
    torch.testing.assert_close(other(x), layer(x))
    seen = []
    other[1].register_forward_hook(lambda *call: seen.append(call))
    layer(x)
    assert not seen and not any(own.requires_grad for own in other.parameters())


def test_parallel_work_keeps_order_grad_mode_and_errors():
    with torch.no_grad():
        assert at_once(lambda x: (x, torch.is_grad_enabled()), [3, 1, 2]) == [(x, False) for x in (3, 1, 2)]
    assert at_once(lambda x: torch.is_grad_enabled(), [1, 2]) == [True, True]
    with pytest.raises(ZeroDivisionError):
        at_once(lambda x: 1 / x, [1, 0])


def test_batches_go_round_the_devices_and_the_halves(tmp_path, monkeypatch):
    """Eleven windows, nine of them calibrating, in batches of two."""
    monkeypatch.setattr("qrt_calibrate.model.streams.BATCH_TOKENS", 80)
    hidden = torch.arange(11.0)[:, None, None].expand(11, 40, 4)
    streams = Streams(hidden, 9, [CPU] * 3, tmp_path)
    batches = [
        [
            (half, windows[:, 0, 0].tolist())
            for half, windows in share.batches(share.exact[: share.calibrating])
        ]
        for share in streams.shares
    ]
    assert batches == [[(0, [0, 1]), (1, [6, 7])], [(1, [2, 3]), (0, [8])], [(0, [4, 5])]]
    evaluating = [float(share.rounded[at, 0, 0]) for share, at in streams.in_order(9, 11)]
    assert evaluating == [9, 10]


def measured(folder, stage, devices, tmp_path, monkeypatch):
    """Moments and codes of the one stage of layer 0 that is rounded, where rounding has already moved the
    hidden states."""
    others = [f"*{part}" for part in STAGES if part != stage]
    fused = {"q_proj": ["*k_proj", "*v_proj"], "gate_proj": ["*up_proj"]}
    others += [part for first, parts in fused.items() if first != stage for part in parts]
    entries = {"bits": 4, "group_size": 64, "method": "awq-gptq", "ignore": others}
    job = plan(open_checkpoint(folder), recipe_of(entries), *devices)
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, 512, (11, 40), generator=generator)
    executor = LayerExecutor(job.checkpoint, job.arch, 40, devices[0])
    hidden = executor.embed(windows)
    moved = 0.05 * hidden.std() * torch.randn(hidden.shape, generator=generator)
    streams = Streams(hidden, 9, devices, tmp_path)
    for share in streams.shares:
        share.rounded += moved[share.numbers].to(share.device)
    found = []
    correction = Moments.take_correction
    with monkeypatch.context() as patch:

        def keep(self, *arguments):
            found.append(copy.deepcopy(self))
            return correction(self, *arguments)

        patch.setattr(Moments, "take_correction", keep)
        tensors = read_layer(job.checkpoint, "model.layers.0")
        codes = quantize_layer(job, 0, tensors, executor, streams).linears
    (moments,) = found
    return moments, torch.cat([weight.values for weight in codes.values()])


def check_same_moments(folder, alone, several, tmp_path, monkeypatch):
    for stage in STAGES:
        one, one_codes = measured(folder, stage, alone, tmp_path, monkeypatch)
        more, more_codes = measured(folder, stage, several, tmp_path, monkeypatch)
        for name in ("mean_abs", "max_abs", "hessian", "drift"):
            wanted, got = getattr(one, name), getattr(more, name)
            assert wanted.shape == got.shape and all(part.abs().amax() > 0 for part in wanted)
            bound = 1e-5 * float(wanted.abs().max())
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=bound, msg=f"{stage} {name}")
        assert (one_codes == more_codes).float().mean() > 0.99, stage


@pytest.mark.parametrize("count", [2, 3])
def test_moments_are_those_of_one_device(count, llama, tmp_path, monkeypatch):
    monkeypatch.setattr("qrt_calibrate.model.streams.BATCH_TOKENS", 80)  # two windows: six batches
    check_same_moments(llama, [CPU], [CPU] * count, tmp_path, monkeypatch)


def run(model, calib, out, *flags):
    """The exit code."""
    cut = ["--n-samples", "16", "--seqlen", "64", "--eval-samples", "8"]
    return cli.main([str(word) for word in ("--model", model, "--calib", calib, "--out", out, *cut, *flags)])


def cost(folder):
    return json.loads((folder / "qrt_report.json").read_text())["cost"]


def files(folder):
    """What is in a checkpoint, without the report's own times."""
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith("qrt_report")
    }


@pytest.mark.parametrize(
    "flags", [["--bits", "4"], ["--scheme", "w8a8"]], ids=["awq-yaqa", "smoothquant-gptq"]
)
def test_two_devices_match_one_and_resume_to_the_same_bytes(
    flags, llama, calib, tmp_path, monkeypatch, capsys
):
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    both = ["--device", "cpu,cpu", *flags]
    assert run(llama, calib, one, "--device", "cpu", *flags) == run(llama, calib, two, *both) == 0
    assert cost(two)["exact_ppl"] == pytest.approx(cost(one)["exact_ppl"], rel=1e-5)
    assert cost(two)["kl"] == pytest.approx(cost(one)["kl"], rel=0.1)
    write = Written.write_layer

    def fails(self, index, result, figures):
        if index == 1:
            raise KeyboardInterrupt
        write(self, index, result, figures)

    with monkeypatch.context() as patch:
        patch.setattr(Written, "write_layer", fails)
        assert run(llama, calib, out, *both) == 130
    assert run(llama, calib, out, "--device", "cpu", *flags) == 1
    assert "parts of another run (devices differs)" in capsys.readouterr().err
    assert run(llama, calib, out, *both) == 0
    assert files(out) == files(two)


def test_memory_is_said_for_each_device(llama):
    recipe = recipe_of({"bits": 4, "method": "awq-gptq"})
    one, two = (preflight(plan(open_checkpoint(llama), recipe, *[CPU] * count)) for count in (1, 2))
    assert (two.working_bytes, two.hidden_bytes) == (one.working_bytes, one.hidden_bytes)
    checkpoint = open_checkpoint(llama)
    layer = sum(checkpoint.spec(name).num_bytes for name in checkpoint.names() if ".layers.0." in name) // 2
    beside = 2 * 4 * 256**2 + 3 * layer  # down is factorized; the layer as it is stored, and its codes
    assert one.replica_bytes == 0 and one.working_bytes - two.replica_bytes == beside
    assert "on each other" in two.lines()[0] and "divided among 2 devices" in two.lines()[0]
    assert "each other" not in one.lines()[0] and "divided" not in one.lines()[0]
    nearest = preflight(
        plan(open_checkpoint(llama), recipe_of({"method": "rtn", "eval_samples": 0}), CPU, CPU)
    )
    assert nearest.replica_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus(llama, calib, tmp_path, monkeypatch):
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    check_same_moments(llama, [first], [first, second], tmp_path, monkeypatch)
    check_same_moments(llama, [second], [second, first], tmp_path, monkeypatch)
    names = ("cuda:0", "cuda:1", "cuda:0,cuda:1", "cuda")
    for name in names:
        assert run("tiny", calib, tmp_path / name, "--device", name, "--bits", "4") == 0
    first, *others = (cost(tmp_path / name)["kl"] for name in names)
    assert others == pytest.approx([first] * 3, rel=0.15)
    assert files(tmp_path / "cuda:0,cuda:1") == files(tmp_path / "cuda")
