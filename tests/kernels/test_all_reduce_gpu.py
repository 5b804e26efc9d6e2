"""The all-reduce of the GPUs of a host, a process each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]


def ranks(what, folder, size=GPUS):
    """Run all_reduce_rank.py once a GPU; the exit codes and what each printed."""
    program = Path(__file__).parent / "all_reduce_rank.py"
    command = [sys.executable, str(program), what, str(folder / "store")]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([*command, str(rank), str(size)], env=environment, **said) for rank in range(size)
    ]
    try:
        said = [one.communicate(timeout=400)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    return [one.returncode for one in running], said


def test_every_form_on_all_ranks(tmp_path):
    """Against fp64, and with the same bits on all ranks."""
    codes, said = ranks("check", tmp_path)
    assert not any(codes), said


def test_a_layer_cut_in_parts(tmp_path):
    """`chain` on every rank, each with its part of the products, against fp64."""
    codes, said = ranks("layer", tmp_path)
    assert not any(codes), said


@pytest.mark.slow
def test_replays_with_hosts_out_of_step(tmp_path):
    """10^5 launches in graphs, bits compared on the way and at the end."""
    codes, said = ranks("soak", tmp_path)
    assert not any(codes), said


def test_a_rank_that_waits_too_long_ends(tmp_path):
    """It does not hang, and its process gets an error of CUDA."""
    codes, said = ranks("stop", tmp_path)
    assert codes == [3] * (GPUS - 1) + [0], said
