"""Clipping picks, per group, the shrink of least activation-weighted error; never worse than no clipping."""

import pytest
import torch

from qrt.quant.affine import choose_qparams, dequantize, quantize
from qrt.quant.spec import Granularity, QuantSpec
from qrt_calibrate import clip
from qrt_calibrate.clip import SHRINKS, search_clip


def errors(weight, x, spec, shrink):
    """Mean squared output error of each group on the inputs x [T, K], from the definition, fp64."""
    scale, zero = choose_qparams(weight, spec, torch.bfloat16, shrink)
    wrong = dequantize(quantize(weight, scale, zero, spec), scale, zero, spec.bits) - weight
    groups = wrong.double().unflatten(1, (-1, 32))
    return torch.einsum("tgi,ngi->ngt", x.double().unflatten(1, (-1, 32)), groups).square().mean(-1)


def moment(x):
    groups = x.unflatten(1, (-1, 32)).transpose(0, 1)
    return groups.mT @ groups / x.shape[0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_each_group_gets_its_best_shrink(symmetric, monkeypatch):
    monkeypatch.setattr(clip, "_BLOCK_ELEMENTS", 5 * 128)  # several blocks, the last one short
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 32)
    torch.manual_seed(0)
    weight = torch.randn(24, 128) ** 3  # heavy tails: clipping pays
    x = (torch.randn(200, 128) + torch.randn(200, 1)) * torch.rand(128) ** 2  # correlated, of unequal size
    shrink = search_clip(weight, moment(x), spec, torch.bfloat16)
    grid = torch.stack([errors(weight, x, spec, s) for s in SHRINKS])
    assert shrink.shape == (24, 4) and (shrink < 1).any() and (shrink == 1).any()
    torch.testing.assert_close(errors(weight, x, spec, shrink), grid.amin(0), rtol=1e-4, atol=1e-9)


def test_a_dead_input_channel_does_not_count():
    spec = QuantSpec(4, True, Granularity.GROUP, 32)
    torch.manual_seed(0)
    weight = torch.rand(50, 32) - 0.5
    weight[:, 5] = 0.75  # the extreme, on a channel that is never active: 0.5 / 0.75 of the range would do
    live = torch.randn(200, 32)
    dead = live.clone()
    dead[:, 5] = 0
    assert search_clip(weight, moment(dead), spec, torch.bfloat16).mean() < 0.75
    assert search_clip(weight, moment(live), spec, torch.bfloat16).mean() > 0.9
