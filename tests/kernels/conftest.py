"""What tests of several kernels share."""

import pytest
import torch

from backends import PTX
from ptx import launch
from qrt.kernels.linear.int8 import hopper_kernel
from qrt.kernels.linear.tiles import wide_kernel


@pytest.fixture
def poisoned_memory():
    """`torch.empty` gives NaN (and the largest integers): what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["late", "early"] if PTX else ["as they come"])
def copies(request, monkeypatch):
    """When the copy engine that is not there delivers: late shows what is not waited for, early what is
    overwritten while it is read."""
    monkeypatch.setitem(launch.settings, "copies", request.param)


@pytest.fixture
def small_gpu(monkeypatch):
    """Two SMs and panels of two token blocks: few blocks are taken in turn, and a panel can be ragged."""
    for kernel in hopper_kernel, wide_kernel:
        monkeypatch.setattr(kernel, "multiprocessors", lambda device: 2)
        monkeypatch.setattr(kernel, "PANEL", 2)
