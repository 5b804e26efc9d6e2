"""Shared test settings: where there is no GPU Triton runs in its interpreter, or with QRT_TEST_PTX=1 what it
compiles is executed (tests/ptx). `gpu` tests skip there, with the latter but for those that are `ptx` too."""

import logging
import os

import hypothesis
import pytest
import torch

from ptx import launch

GPU = torch.cuda.is_available()
PTX = not GPU and os.environ.get("QRT_TEST_PTX") == "1"
if PTX:
    launch.install()
elif not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel module is imported
hypothesis.settings.register_profile("thorough", max_examples=10_000)
torch.set_num_threads(1)  # two pytest workers share two cores


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not GPU and not (PTX and item.get_closest_marker("ptx")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def root_logger():
    """As it was: a command that sets up logging leaves a handler on this test's stderr, which is closed."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, whichever tests its process has run before."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """Where kernel tests put their tensors: the GPU, or the CPU with Triton's interpreter."""
    return torch.device("cuda" if GPU else "cpu")
