"""Ranks as processes: they meet on this machine alone, and whatever ends one ends all, by name."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiny_models import random_checkpoint

SECONDS = 90
PROGRAM = """
import json, sys
from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.engine.ranks import group
from qrt.request.sampling import SamplingParams

own = {"device": "cpu", "tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 20}
engine = Engine(EngineConfig(sys.argv[1], **own))
engine.add("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
tokens = []
while engine.has_work:
    for delta in engine.step():
        tokens += delta.token_ids
group.SILENT_SECONDS = 3.0
ranks = [child.pid for _, child, _ in engine._group._ranks]
print(json.dumps({"tokens": tokens, "ranks": ranks}), flush=True)
sys.stdin.read()
engine.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return random_checkpoint(folder, "LlamaForCausalLM", vocab_size=100, num_hidden_layers=1)


@pytest.fixture
def two(folder):
    """A process with two ranks, and what it has said."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said = json.loads(process.stdout.readline())
    yield process, said
    process.kill()
    for rank in said["ranks"]:  # one that outlives a failed test would keep the pipes open
        if not is_gone(rank):
            os.kill(rank, signal.SIGKILL)
    process.communicate()


def listeners(pid):
    """The addresses at which a process listens."""
    inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()}
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].split(":")[0])
    return found


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(true):
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_death_of_a_rank_ends_all_by_name(two):
    process, said = two
    assert len(said["tokens"]) == 5
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert loopback.issuperset(listeners(process.pid) + listeners(said["ranks"][0]))
    os.kill(said["ranks"][0], signal.SIGKILL)
    assert process.wait(SECONDS) == 1
    assert "rank 1 (cpu) died: SIGKILL; the engine ends" in process.stderr.read()


@pytest.mark.slow
def test_a_stopped_rank_ends_all_by_name(two):
    process, said = two
    os.kill(said["ranks"][0], signal.SIGSTOP)
    assert process.wait(SECONDS) == 1
    assert "rank 1 (cpu) has not moved for 3 s; the engine ends" in process.stderr.read()
    wait_until(lambda: is_gone(said["ranks"][0]))


@pytest.mark.slow
@pytest.mark.parametrize("kill", [True, False])
def test_no_rank_outlives_rank_0(two, kill):
    process, said = two
    if kill:
        process.kill()
    process.communicate(timeout=SECONDS)
    assert kill or process.returncode == 0
    wait_until(lambda: is_gone(said["ranks"][0]))
