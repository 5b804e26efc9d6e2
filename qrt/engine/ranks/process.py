"""The process of a rank other than 0: build its part of the model, then run what the orders say.

Rank 0 starts it as `python -m qrt.engine.ranks.process`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch

from qrt.cli import run_main, set_up_logging
from qrt.engine.build import build
from qrt.engine.ranks.group import BEAT_SECONDS, RankSpec
from qrt.engine.ranks.orders import Forward, Launch, OrderReader, SampleOrder
from qrt.engine.step.runner import Runner
from qrt.kernels.tensor_parallel import TensorParallelGroup


def serve(spec: RankSpec) -> None:
    """Build the rank's part of the model, and run orders until rank 0 closes the socket."""
    peers = TensorParallelGroup.join(
        Path(spec.store), spec.rank, spec.size, torch.device(str(spec.engine.device))
    )
    runner = build(spec.engine, peers=peers).runner
    follow(runner, OrderReader(socket.socket(fileno=spec.orders)))
    runner.forget()
    peers.close()


def follow(runner: Runner, orders: OrderReader) -> None:
    """Run what the orders say until they end. What a step gives is rank 0's to read."""
    forwarded = None
    while (order := orders.read()) is not None:
        match order:
            case Launch(plan=plan):
                runner.launch(plan)
            case Forward(plan=plan):
                forwarded = runner.forward(plan)
            case SampleOrder():
                assert forwarded is not None
                runner.mask_rows()  # none is filled: rank 0 draws by masks
                runner.sample(forwarded, [], [])


def _live(life: socket.socket) -> None:
    """Show signs of life; end the process when rank 0 ends, even in the middle of a kernel."""
    while True:
        try:
            life.sendall(b".")
        except OSError:
            os._exit(1)
        time.sleep(BEAT_SECONDS)


def _die_with(life: socket.socket) -> None:
    """End the process as soon as rank 0 has closed its end."""
    with contextlib.suppress(OSError):
        life.recv(1)
    os._exit(1)


def main() -> None:
    """Read the RankSpec from stdin and serve."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends this process
        signal.signal(number, signal.SIG_IGN)
    life = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    line = bytearray()
    while not line.endswith(b"\n"):
        line += life.recv(1 << 16)
    spec = msgspec.json.decode(line, type=RankSpec)
    set_up_logging(spec.level, f"rank-{spec.rank} {spec.engine.device} pid={os.getpid()}")
    for run in (_live, _die_with):
        threading.Thread(target=run, args=[life], daemon=True).start()
    sys.exit(run_main(lambda: serve(spec)))


if __name__ == "__main__":
    main()
