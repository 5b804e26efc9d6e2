"""What tests of several kernels share."""

import pytest
import torch

from backends import PTX
from ptx import launch
from qrt.kernels.linear.int8 import hopper_kernel
from qrt.kernels.linear.tiles import wide_kernel
from qrt.quant.kv import KV_FORMATS


@pytest.fixture(autouse=True)
def formats_with_kernels(request):
    """Skip a test of a kernel with a KV format that has no Triton functions; a reference needs none."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    name = parameters.get("name")
    if name in KV_FORMATS and not KV_FORMATS[name].has_device and not any(map(_is_ref, parameters.values())):
        pytest.skip(f"KV format {name} has no device.py; references alone run it")


def _is_ref(value):
    """Return whether the value is a reference, or its module."""
    return str(getattr(value, "__module__", getattr(value, "__name__", ""))).endswith(".ref")


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
