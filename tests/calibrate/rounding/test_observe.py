"""Sums over tokens are those of their definition."""

import pytest
import torch

from qrt_calibrate.rounding import observe
from qrt_calibrate.rounding.observe import add_square


@pytest.mark.parametrize("inputs", [3, 8, 37])
def test_a_square_by_halves_is_that_of_the_definition(inputs, monkeypatch):
    monkeypatch.setattr(observe, "WHOLE", 5)
    x, total = torch.randn(2, 20, inputs), torch.zeros(inputs, inputs)
    for own in x:
        add_square(total, own, 0.5)
    wanted = 0.5 * torch.einsum("btk,btl->kl", x.double(), x.double())
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-5)
