"""Ranks as threads of one process: real plans, real orders, and all-reduces through a barrier."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch

from qrt.engine import engine as engine_module
from qrt.engine.build import build
from qrt.engine.engine import Engine
from qrt.engine.ranks.orders import OrderReader, OrderSender
from qrt.engine.ranks.process import follow
from qrt.kernels.tensor_parallel import TensorParallelGroup

SECONDS = 60


class Meeting:
    """Where threads of ranks hand each other what they have."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.given = [None] * size

    def all(self, rank, value):
        """What every rank gives, in order."""
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class ThreadPeers(TensorParallelGroup):
    def __init__(self, rank, size, meeting):
        super().__init__(rank, size, torch.device("cpu"))
        self.meeting = meeting

    def _gathered(self, x):
        return [part.clone() for part in self.meeting.all(self.rank, x)]

    def all_to_all(self, x):
        most = -(-len(x) // self.size)
        parts = [part[self.own_rows(len(x))] for part in self._gathered(x)]
        return torch.stack(
            [torch.cat([part, part.new_zeros(most - len(part), x.shape[1])]) for part in parts]
        )

    def all_reduce_max(self, x):
        return torch.stack(self.meeting.all(self.rank, x.clone())).amax(0)

    def broadcast(self, x):
        return x.copy_(self.meeting.all(self.rank, x.clone())[0])

    def all_gather_int(self, number):
        return self.meeting.all(self.rank, number)


class ThreadGroup:
    """Stands for a RankGroup: `others` are the runners of the ranks that follow."""

    def __init__(self, config, size):
        meeting = Meeting(size)
        self.peers, *others = (ThreadPeers(rank, size, meeting) for rank in range(size))
        pairs = [socket.socketpair() for _ in others]
        self.sender = OrderSender([ours for ours, _ in pairs])
        self.others = []
        self.pool = ThreadPoolExecutor(size)
        self.done = [
            self.pool.submit(self._rank, config, peers, theirs)
            for peers, (_, theirs) in zip(others, pairs, strict=True)
        ]

    def _rank(self, config, peers, end):
        try:
            runner = build(config, peers=peers).runner
            self.others.append(runner)
            follow(runner, OrderReader(end))
        except BaseException:
            peers.meeting.barrier.abort()
            raise

    @contextmanager
    def order(self, kind, plan=None):
        self.sender.send(kind, plan)
        yield

    def close(self):
        self.sender.close()
        for future in self.done:
            future.result(SECONDS)


@contextmanager
def shared_engine(config, ranks):
    """An engine over `ranks` ranks, and its group."""
    group = None if ranks == 1 else ThreadGroup(config, ranks)
    with mock.patch.object(engine_module, "_group_of", lambda config: group):
        engine = Engine(config)
    try:
        yield engine, group
    finally:
        if group is not None:
            group.close()
