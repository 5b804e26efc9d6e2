"""RankGroup: rank 0's hold on the processes of the other ranks, and their end if one of them ends.

Ranks wait for each other inside kernels. So whatever ends one of them ends them all, at once and by name:
nothing can be saved of a step that lacks a part of the model.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from qrt.config import EngineConfig
from qrt.engine.ranks.orders import OrderKind, OrderSender
from qrt.engine.schedule.plan import Plan
from qrt.kernels.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)

MODULE = "qrt.engine.ranks.process"
BEAT_SECONDS = 1.0  # time between two signs of life of a rank
END_SECONDS = 10.0  # time for a rank to end by itself
BLAME_SECONDS = 1.0  # time for the news of a rank's death, where its absence was noticed first
SILENT_SECONDS = 30.0  # a rank without a sign of life for so long counts as stopped


class RankSpec(msgspec.Struct, frozen=True):
    """What a rank's process is told, as one line of JSON on its stdin.

    engine    the settings, with `device` the rank's own
    rank      its number, and `size` how many there are
    store     the file through which they meet
    orders    the file descriptor of the socket that orders come by
    level     of its log
    """

    engine: EngineConfig
    rank: int
    size: int
    store: str
    orders: int
    level: int


class RankGroup:
    """The processes of ranks 1 to `tensor_parallel_size` - 1, from rank 0's side.

    peers   rank 0's view of all ranks
    """

    def __init__(self, config: EngineConfig, devices: list[torch.device]) -> None:
        """Start a process for each of `devices` but the first, which is this process's, and meet them."""
        self._closing = False
        self._ranks: list[tuple[str, subprocess.Popen[bytes], socket.socket]] = []
        orders = []
        with tempfile.TemporaryDirectory(prefix="qrt-") as folder:  # mode 0700
            store = Path(folder) / "ranks"
            for rank, device in enumerate(devices[1:], 1):
                engine = replace(config, device=str(device))
                own = RankSpec(engine, rank, len(devices), str(store), -1, logger.getEffectiveLevel())
                orders.append(self._start(own, device))
            self._sender = OrderSender(orders)
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
            self.peers = TensorParallelGroup.join(store, 0, len(devices), devices[0])

    def _start(self, spec: RankSpec, device: torch.device) -> socket.socket:
        """Start a rank; return our end of the socket of its orders."""
        life, its_life = socket.socketpair()
        orders, its_orders = socket.socketpair()
        with its_life, its_orders:
            child = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=its_life.fileno(),
                pass_fds=[its_orders.fileno()],
                env={**os.environ, "TQDM_DISABLE": "1"},
            )
            own = msgspec.structs.replace(spec, orders=its_orders.fileno())
            life.sendall(msgspec.json.encode(own) + b"\n")
        self._ranks.append((f"rank {spec.rank} ({device})", child, life))
        return orders

    @contextmanager
    def order(self, kind: OrderKind, plan: Plan | None = None) -> Iterator[None]:
        """Tell all ranks to run what this context runs here.

        Ctrl-C waits until both have happened. An exception ends the process: the others would wait for it.
        """
        main = threading.current_thread() is threading.main_thread()
        if main:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._sender.send(kind, plan)
            yield
        except Exception:
            time.sleep(BLAME_SECONDS)  # if another rank has died, `_watch` ends the process and names it
            logger.exception("rank 0 (%s) failed in a step; the engine ends", self.peers.device)
            self._end()
        finally:
            if main:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def close(self) -> None:
        """End the other ranks, once they have run what they were told."""
        self._closing = True
        self._sender.close()
        self.peers.close()  # NCCL waits here for all of them
        for _, child, life in self._ranks:
            life.close()
            try:
                child.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _watch(self) -> None:
        """Wait for the end or the silence of a rank, which counts from its first sign of life on."""
        heard: dict[int, float] = {}
        ends = {life: index for index, (_, _, life) in enumerate(self._ranks)}
        while not self._closing:
            try:
                ready, _, _ = select.select(ends, [], [], BEAT_SECONDS)
                gone = [ends[life] for life in ready if not life.recv(4096)]
            except (OSError, ValueError):
                return  # closed
            now = time.monotonic()
            heard |= {ends[life]: now for life in ready}
            if self._closing:
                return
            for index in gone:
                name, child, _ = self._ranks[index]
                logger.error("%s died: %s; the engine ends", name, _status(child.wait()))
                self._end()
            for index, last in heard.items():
                if now - last > SILENT_SECONDS:
                    name = self._ranks[index][0]
                    logger.error("%s has not moved for %.0f s; the engine ends", name, now - last)
                    self._end()

    def _end(self) -> NoReturn:
        for _, child, _ in self._ranks:
            child.kill()
        os._exit(1)


def _status(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
