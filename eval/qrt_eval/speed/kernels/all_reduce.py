"""Time the sum over GPUs with its norm: through peers' memory, by NCCL, and the norm alone.

`rows` starts a process a GPU, which runs this module.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qrt.arch import Arch
from qrt.errors import ConfigError
from qrt.kernels.all_reduce.choose import choose
from qrt.kernels.gpu import launches_on
from qrt.kernels.rmsnorm import add_rmsnorm
from qrt.kernels.tensor_parallel import TensorParallelGroup
from qrt_eval.speed.kernels.row import KernelRow
from qrt_eval.speed.kernels.timer import Rates, activation_dtype, microseconds

CALLS = 20  # in a graph
DEADLINE_S = 900
Cell = tuple[str, int, float]  # name, tokens, microseconds


def rows(config: Arch, tokens: Sequence[int], rates: Rates, device: torch.device) -> Iterator[KernelRow]:
    """Yield three rows a number of tokens, for all GPUs of this machine."""
    size = torch.cuda.device_count() if device.type == "cuda" else 0
    if size < 2:
        print(f"--op all-reduce: left out: expected two GPUs or more, got {size}", file=sys.stderr)
        return
    width = config.hidden_size
    for what, count, us in _measured(size, width, tokens):
        num_bytes = 4 * count * width * activation_dtype(device).itemsize
        at = f"T={count} ({count * width * 2 >> 10} KB)"
        yield KernelRow(
            "all-reduce", what, at, us, rates.floor_us(num_bytes), num_bytes, 0, "NCCL" not in what
        )


def _measured(size: int, width: int, tokens: Sequence[int]) -> list[Cell]:
    """Run a rank a GPU; return name, tokens and microseconds of each cell, of the slowest rank."""
    with TemporaryDirectory() as folder:
        task = json.dumps([str(Path(folder) / "store"), size, width, list(tokens)])
        command = [sys.executable, "-m", __spec__.name, task]
        running = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(size)]
        try:
            said = [one.communicate(timeout=DEADLINE_S)[0] for one in running]
        finally:
            for one in running:
                one.kill()
    if failed := [rank for rank, one in enumerate(running) if one.returncode]:
        raise ConfigError(f"--op all-reduce: expected all ranks to end well, got an error of ranks {failed}")
    return [tuple(cell) for cell in json.loads(said[0].splitlines()[-1])]


def _rank(rank: int, store: str, size: int, width: int, tokens: Sequence[int]) -> list[Cell]:
    """Return the cells, timed as one of the ranks."""
    device = torch.device("cuda", rank)
    with launches_on(device), torch.inference_mode():
        peers = TensorParallelGroup.join(Path(store), rank, size, device)
        memory = choose(peers, width, "peer", torch.bfloat16)
        assert memory is not None
        weight = torch.ones(width, dtype=torch.bfloat16, device=device)
        cells: list[Cell] = []

        def cell(what: str, count: int, call: Callable[..., Any], operands: Sequence[Any]) -> None:
            us = microseconds(call, [operands] * CALLS)
            cells.append((what, count, max(peers.all_gather_int(int(us * 1000))) / 1000))

        for count in tokens:
            x, residual = torch.zeros(2, count, width, dtype=torch.bfloat16, device=device)
            norm = residual, x, weight, 1e-5
            if memory.takes(x):
                through = *norm, None, 0.0, 1.0, memory.words
                cell(f"add + norm of {size} GPUs", count, add_rmsnorm, through)
            cell(
                f"NCCL of {size}, add + norm",
                count,
                lambda residual, x, *rest: add_rmsnorm(residual, peers.all_reduce(x), *rest),
                norm,
            )
            cell("add + norm alone", count, add_rmsnorm, norm)
        peers.all_gather_int(0)
    return cells


if __name__ == "__main__":
    print(json.dumps(_rank(int(sys.argv[2]), *json.loads(sys.argv[1]))), flush=True)
