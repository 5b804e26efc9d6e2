"""The scale search is never worse than rounding to nearest, and its candidates are what they should be."""

import pytest
import torch
from torch import nn

from qrt.arch.base import Smooth
from qrt.quant.affine import choose_qparams, dequantize, quantize
from qrt.quant.spec import Granularity, QuantSpec
from qrt_calibrate.fold import Pair
from qrt_calibrate.observe import Call
from qrt_calibrate.search import candidates, search_scales

SPEC = QuantSpec(4, symmetric=False, granularity=Granularity.GROUP, group_size=32)


class Block(nn.Module):
    """A norm and one reader: the smallest thing with a smoothing pair."""

    def __init__(self, outliers=0.0, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.reader = nn.RMSNorm(64), nn.Linear(64, 48, bias=False)
        self.requires_grad_(False)
        self.x = torch.randn(100, 64)
        self.x[:, :8] *= 1 + outliers
        self.reader.weight[:, :8] /= 1 + outliers


def search(block, dtype=torch.bfloat16, spec=SPEC):
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    call = Call(block.reader, (block.x,), {}, block.reader(block.x))
    before = block.reader.weight.clone()
    found = search_scales(pair, call, block.x.abs().mean(0), spec, dtype)
    assert torch.equal(block.reader.weight, before)
    return found


def loss(block, scales, dtype=torch.bfloat16):
    """From the definition, apart from the search's own code."""
    weight = block.reader.weight * scales
    scale, zero = choose_qparams(weight, SPEC, dtype)
    rounded = dequantize(quantize(weight, scale, zero, SPEC), scale, zero, 4)
    return ((block.x / scales) @ rounded.T - block.x @ block.reader.weight.T).square().mean()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("outliers", [0.0, 15.0, 63.0])
def test_never_worse_than_rounding_and_losses_are_true(outliers, seed):
    block = Block(outliers, seed)
    found = search(block)
    assert found.loss <= found.rtn_loss
    torch.testing.assert_close(torch.tensor(found.rtn_loss), loss(block, torch.ones(64)))
    torch.testing.assert_close(torch.tensor(found.loss), loss(block, found.scales))
    if outliers:
        assert found.loss < 0.5 * found.rtn_loss
        assert found.scales[:8].min() > found.scales[8:].max()


def test_finds_the_best_of_its_candidates():
    block = Block(outliers=7.0)
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    tried = list(candidates(pair, block.x.abs().mean(0), SPEC))
    torch.testing.assert_close(torch.tensor(search(block).loss), min(loss(block, s) for s in tried))


def test_candidates_are_powers_of_two_and_dead_channels_keep_one():
    block = Block(outliers=7.0)
    mean_abs = block.x.abs().mean(0)
    mean_abs[[3, 40]] = 0
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    tried = list(candidates(pair, mean_abs, SPEC))
    assert torch.equal(tried[0], torch.ones(64)) and 2 < len(tried) <= 20
    for scales in tried:
        assert torch.equal(scales, torch.exp2(scales.log2().round())) and torch.isfinite(scales).all()
        assert (scales[[3, 40]] == 1).all()
    assert len(list(candidates(pair, torch.zeros(64), SPEC))) == 1


def test_candidates_that_the_dtype_cannot_hold_are_not_tried():
    block = Block(outliers=2.0**20)
    block.norm.weight.copy_(1 + 0.5 * torch.rand(64))
    block.norm.weight.copy_(block.norm.weight.half().float())
    found = search(block, torch.float16)
    folded = block.norm.weight / found.scales
    assert torch.equal(folded.half().float(), folded)
