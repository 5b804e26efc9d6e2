"""What tests of several kernels share."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """`torch.empty` gives NaN (and the largest integers): what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
