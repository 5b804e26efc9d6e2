"""Killed at any moment, the same command goes on and writes the same bytes; what is damaged is one line."""

import os
import signal
import subprocess
import sys
import time
from select import select

import pytest
import torch

from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate import cli
from qrt_calibrate.rounding import gptq
from tiny_models import altered

CODE = """
import os, sys, torch
from qrt_calibrate import cli, pipeline  # once, which takes longer than to calibrate
from qrt_calibrate.rounding import gptq

torch.set_num_threads(1)
gptq.ROW_BLOCKS = int(sys.argv[1])
for _ in sys.stdin:
    if not (child := os.fork()):
        os._exit(cli.main(sys.argv[2:]))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.fixture(scope="module")
def deep(make_checkpoint):
    return make_checkpoint(
        "LlamaForCausalLM", dtype=torch.bfloat16, num_hidden_layers=5
    )  # killed before the last


def words(model, calib, out):
    cut = ["--n-samples", 4, "--seqlen", 64, "--eval-samples", 1, "--bits", 4]
    return [str(word) for word in ("--model", model, "--calib", calib, "--out", out, *cut)]


def run(model, calib, out):
    return cli.main(words(model, calib, out))


def finished(folder):
    return len(list(folder.glob("layer-*.json")))


@pytest.mark.slow
def test_kill_at_three_moments(deep, calib, tmp_path):
    """A whole run here, one in pieces in processes of their own."""
    assert run(deep, calib, tmp_path / "whole") == 0
    partial = tmp_path / "out.partial"
    command = [sys.executable, "-c", CODE, str(gptq.ROW_BLOCKS), *words(deep, calib, tmp_path / "out")]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, stderr=subprocess.DEVNULL, text=True, bufsize=1) as runs:
        for moment, delay in ((1, 0.0), (2, 0.07), (4, 0.15)):
            runs.stdin.write("once more\n")
            running = int(runs.stdout.readline())
            while finished(partial) < moment and not select([runs.stdout], [], [], 0.005)[0]:
                pass  # until there are so many, or it is gone
            time.sleep(delay)
            os.kill(running, signal.SIGKILL)
            assert runs.stdout.readline() == "gone\n"
            assert not (tmp_path / "out").exists() and finished(partial) >= moment
        said, _ = runs.communicate("to the end\n")
        assert said.endswith("gone\n") and not partial.exists()
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_dead_channels_are_no_trouble(llama, calib, tmp_path):
    """An input that is always zero, and weights that are: finite scales, zeros where zeros were."""

    def kill(tensors):
        tensors["model.layers.0.input_layernorm.weight"][7] = 0
        tensors["model.layers.0.mlp.up_proj.weight"][9] = 0
        tensors["model.layers.1.self_attn.q_proj.weight"][:, :] = 0

    model = altered(llama, tmp_path / "dead", kill)
    assert run(model, calib, tmp_path / "out") == 0
    read = open_checkpoint(tmp_path / "out")
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"):
        assert read.linear(name)[1].dequantize().isfinite().all()
    assert (read.linear("model.layers.0.mlp.up_proj")[1].dequantize()[9] == 0).all()
    assert (read.linear("model.layers.1.self_attn.q_proj")[1].dequantize() == 0).all()


def test_a_shard_cut_short_and_a_folder_that_cannot_be_written(llama, calib, tmp_path, capsys):
    short = altered(llama, tmp_path / "short", lambda tensors: None)
    path = short / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert run(short, calib, tmp_path / "out") == 1
    assert "model.safetensors: truncated" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run(llama, calib, tmp_path / "file" / "out") == 1
    assert "file/out.partial: cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
