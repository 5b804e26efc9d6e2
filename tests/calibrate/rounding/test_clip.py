"""Clipping picks, per group, the shrink of least weighted error; never worse than no clipping."""

import pytest
import torch

from qrt.quant.affine import choose_qparams, dequantize, quantize
from qrt.quant.spec import Granularity, QuantSpec
from qrt_calibrate.rounding import clip
from qrt_calibrate.rounding.clip import SHRINKS, search_clip


def errors(weight, importance, spec, shrink):
    """Weighted squared error of each group, from the definition, fp64."""
    scale, zero = choose_qparams(weight, spec, torch.bfloat16, shrink)
    wrong = dequantize(quantize(weight, scale, zero, spec), scale, zero, spec.bits) - weight
    return (wrong.double().square() * importance).unflatten(1, (-1, 32)).sum(-1)


@pytest.mark.parametrize("symmetric", [True, False])
def test_each_group_gets_its_best_shrink(symmetric, monkeypatch):
    monkeypatch.setattr(clip, "_BLOCK_ELEMENTS", 5 * 128)  # several blocks, the last one short
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 32)
    torch.manual_seed(0)
    weight = torch.randn(24, 128) ** 3  # heavy tails: clipping pays
    importance = torch.rand(128) ** 4
    shrink = search_clip(weight, importance, spec, torch.bfloat16)
    grid = torch.stack([errors(weight, importance, spec, s) for s in SHRINKS])
    assert shrink.shape == (24, 4) and (shrink < 1).any() and (shrink == 1).any()
    torch.testing.assert_close(errors(weight, importance, spec, shrink), grid.amin(0), rtol=1e-4, atol=1e-9)


def test_a_dead_input_channel_does_not_count():
    spec = QuantSpec(4, True, Granularity.GROUP, 32)
    torch.manual_seed(0)
    weight = torch.rand(50, 32) - 0.5
    weight[:, 5] = 0.75  # the extreme, on a channel that is never active: 0.5 / 0.75 of the range would do
    dead = torch.ones(32)
    dead[5] = 0
    assert search_clip(weight, dead, spec, torch.bfloat16).mean() < 0.75
    assert search_clip(weight, torch.ones(32), spec, torch.bfloat16).mean() > 0.9
