"""Which way the ranks of a host all-reduce, and what is said of it."""

import contextlib
import logging

import pytest
import torch

from qrt.errors import ConfigError
from qrt.kernels.all_reduce import blocks, choose
from qrt.kernels.tensor_parallel import TensorParallelGroup

GPU = torch.device("cuda", 0)


@pytest.fixture
def peers(monkeypatch, caplog):
    """Two ranks on GPUs that are not there; `peers.finds` is what trying gives: an error, or the times."""
    caplog.set_level(logging.INFO)
    peers = TensorParallelGroup(0, 2, GPU)
    peers.all_gather_int = lambda number: [number, number + 1]
    peers.finds = (5.1, 17.3)
    for name, value in {
        "launches_on": lambda device: contextlib.nullcontext(),
        "multiprocessors": lambda device: 132,
        "_try": lambda peers, memory: None,
        "_times": lambda peers, memory, width, dtype: peers.finds,
    }.items():
        monkeypatch.setattr(choose, name, value)

    def opened(peers, rows, row_bytes):
        if isinstance(peers.finds, Exception):
            raise peers.finds
        return rows, row_bytes

    monkeypatch.setattr(blocks, "open_memory", opened)
    return peers


def test_what_is_faster_is_taken(peers, caplog):
    assert choose.choose(peers, 8192, "auto", torch.bfloat16) == (256, 4 * 8192)
    assert "up to 256 tokens; one token with its norm takes 5.1 us through memory, 17.3" in caplog.text
    peers.finds = (20.0, 17.3)
    assert choose.choose(peers, 8192, "auto", torch.bfloat16) is None
    assert "all-reduce: by NCCL; one token" in caplog.text
    assert choose.choose(peers, 8192, "peer", torch.bfloat16) is not None


def test_gpus_out_of_reach(peers, caplog):
    peers.finds = blocks.PeerError("memory of rank 1: no way")
    assert choose.choose(peers, 8192, "auto", torch.bfloat16) is None
    assert (
        "all-reduce: by NCCL, as no GPU reaches another one's memory: memory of rank 1: no way" in caplog.text
    )
    with pytest.raises(ConfigError, match=r"all-reduce: expected .* got memory of rank 1: no way; use nccl"):
        choose.choose(peers, 8192, "peer", torch.bfloat16)


def test_what_is_not_tried(peers, caplog):
    peers.finds = AssertionError()
    assert choose.choose(peers, 8192, "nccl", torch.bfloat16) is None and "by NCCL" in caplog.text
    assert choose.choose(TensorParallelGroup(0, 2, torch.device("cpu")), 64, "auto", torch.float32) is None
    assert "by gloo" in caplog.text
    caplog.clear()
    assert (
        choose.choose(TensorParallelGroup(0, 1, GPU), 8192, "peer", torch.bfloat16) is None
        and not caplog.text
    )
    peers.rank = 1  # only the first one speaks
    assert choose.choose(peers, 8192, "nccl", torch.bfloat16) is None and not caplog.text


def test_lost_words_count_for_all_ranks(peers, monkeypatch):
    """100 rounds; the rank that lost nothing refuses as well."""
    monkeypatch.undo()
    rounds = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        choose.kernel, "probe", lambda m, wrong, number, write: rounds.append((number, write))
    )
    peers.device = torch.device("cpu")
    peers.all_gather_int = lambda number: [number, 0]
    choose._try(peers, None)
    assert rounds == [(number, write) for number in range(100) for write in (True, False)]
    peers.all_gather_int = lambda number: [number, 7]
    with pytest.raises(blocks.PeerError, match=r"7 words lost in 100 rounds, by ranks: \[0, 7\]"):
        choose._try(peers, None)


def test_no_driver_is_an_error_of_all_ranks(monkeypatch):
    """One rank cannot allocate: all hear it, and none waits for the other."""
    peers = TensorParallelGroup(1, 2, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(blocks, "_gathered", lambda handle, peers: [handle] * 2)
    monkeypatch.setattr(blocks, "_allocate", lambda *sizes: 4096)
    monkeypatch.setattr(blocks, "_handle_of", lambda address: bytes(64))
    monkeypatch.setattr(blocks, "_open", lambda handle: 8192)
    peers.all_gather_int = lambda number: [0, number]
    memory = blocks.open_memory(peers, 8, 64)
    assert memory.words.tolist()[1:] == [1, 9, 64, 4096, 8192]
    peers.all_gather_int = lambda number: [1, number]
    with pytest.raises(blocks.PeerError, match="rank 0 has no access"):
        blocks.open_memory(peers, 8, 64)

    def refused(handle):
        raise blocks.PeerError("not supported")

    monkeypatch.setattr(blocks, "_open", refused)
    with pytest.raises(blocks.PeerError, match="memory of rank 0: not supported"):
        blocks.open_memory(peers, 8, 64)
