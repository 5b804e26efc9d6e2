"""The scale search is never worse than rounding to nearest, and its candidates are what they should be."""

import pytest
import torch
from torch import nn

from qrt.arch.base import Smooth
from qrt.quant.affine import choose_qparams, dequantize, quantize
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.tokens import QuantizedTokens
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.fold import Pair
from qrt_calibrate.rounding.gptq import round_columns
from qrt_calibrate.rounding.observe import Call
from qrt_calibrate.rounding.search import (
    ColumnCost,
    RoundedCost,
    TokenNoise,
    awq_candidates,
    smooth_candidates,
)

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


def candidates(pair, magnitude, powers=True):
    return awq_candidates(pair, magnitude, SPEC, powers)


def find(block, dtype=torch.bfloat16):
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    call = Call(block.reader, (block.x,), {}, block.reader(block.x))
    before = block.reader.weight.clone()
    cost = RoundedCost(pair, call, SPEC, dtype, int8_tokens=False)
    scales = min(candidates(pair, block.x.abs().mean(0)), key=cost)
    costs = cost(torch.ones(64)), cost(scales)
    assert torch.equal(block.reader.weight, before)
    return scales, *costs


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
    scales, plain, cost = find(block)
    assert cost <= plain
    torch.testing.assert_close(torch.tensor(plain), loss(block, torch.ones(64)))
    torch.testing.assert_close(torch.tensor(cost), loss(block, scales))
    if outliers:
        assert cost < 0.5 * plain
        assert scales[:8].min() > scales[8:].max()


def test_finds_the_best_of_its_candidates():
    block = Block(outliers=7.0)
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    tried = list(candidates(pair, block.x.abs().mean(0)))
    torch.testing.assert_close(torch.tensor(find(block)[2]), min(loss(block, s) for s in tried))


def test_candidates_are_powers_of_two_and_dead_channels_keep_one():
    block = Block(outliers=7.0)
    mean_abs = block.x.abs().mean(0)
    mean_abs[[3, 40]] = 0
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    tried = list(candidates(pair, mean_abs))
    assert torch.equal(tried[0], torch.ones(64)) and 2 < len(tried) <= 20
    for scales in tried:
        assert torch.equal(scales, torch.exp2(scales.log2().round())) and torch.isfinite(scales).all()
        assert (scales[[3, 40]] == 1).all()
    assert len(list(candidates(pair, torch.zeros(64)))) == 1


def test_real_scales_where_folds_need_not_be_exact():
    block = Block(outliers=7.0)
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    tried = list(candidates(pair, block.x.abs().mean(0), powers=False))[1:]
    assert all((scales.log2() % 1 != 0).any() for scales in tried)
    for scales in tried:
        torch.testing.assert_close(scales.max() * scales.min(), torch.tensor(1.0))


def test_awq_weighs_a_channel_by_its_input_and_its_weights():
    """x^r / w^(1-r), w relative to the largest of its row's group, for r from 0 to 1; up to a factor."""
    block = Block(outliers=15.0)
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    x, w = block.x.abs().mean(0), block.reader.weight.abs()
    w = torch.cat([(part / part.amax(1, keepdim=True)).mean(0) for part in w.split(32, 1)])
    _, *tried = candidates(pair, x, powers=False)
    for r, scales in zip(torch.linspace(0, 1, 19), tried, strict=True):
        ratio = scales / (x**r / w ** (1 - r))
        torch.testing.assert_close(ratio, ratio[0].expand(64), rtol=5e-3, atol=0)  # the search adds 1e-4 to w


@pytest.mark.parametrize("tokens", [False, True])
def test_int8_tokens_are_rounded_after_the_fold(tokens):
    block = Block(outliers=15.0)
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    scales = torch.exp2(torch.arange(64) % 5 - 2.0)
    call = Call(block.reader, (block.x,), {}, block.reader(block.x))
    got = RoundedCost(pair, call, SPEC, torch.bfloat16, int8_tokens=tokens)(scales)
    exact, x = block.x @ block.reader.weight.T, block.x / scales
    if tokens:
        step = x.abs().amax(1, keepdim=True) / 127
        x = torch.round(x / step) * step
    weight = block.reader.weight * scales
    scale, zero = choose_qparams(weight, SPEC, torch.bfloat16)
    rounded = dequantize(quantize(weight, scale, zero, SPEC), scale, zero, 4)
    torch.testing.assert_close(torch.tensor(got), (x @ rounded.T - exact).square().mean(), rtol=1e-4, atol=0)


def test_smoothquant_shares_an_outlier_by_its_strength():
    """x^a / w^(1-a) from the paper, up to the common factor that a fold may have."""
    block = Block(outliers=63.0)
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    largest = block.x.abs().amax(0)
    identity, *tried = smooth_candidates(pair, largest, powers=False)
    assert (identity == 1).all() and len(tried) == 5
    for alpha, scales in zip((0.3, 0.5, 0.65, 0.8, 0.9), tried, strict=True):
        wanted = largest**alpha / block.reader.weight.abs().amax(0) ** (1 - alpha)
        ratio = scales / wanted
        torch.testing.assert_close(ratio, ratio[0].expand(64))


def test_column_cost_ranks_candidates_as_gptq_does():
    """It is what truly running GPTQ leaves, and its least is near the least of all candidates."""
    block = Block(outliers=15.0)
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    hessian = block.x.T @ block.x / 100
    cost = ColumnCost(pair, Factor.of(hessian, 0.01), SPEC)
    foreseen, true = [], []
    for scales in candidates(pair, block.x.abs().mean(0)):
        foreseen.append(cost(scales))
        folded, weight = hessian / scales / scales[:, None], block.reader.weight * scales
        scale, zero = choose_qparams(weight, SPEC, torch.bfloat16)
        wrong = round_columns(weight, Factor.of(folded, 0.01), scale, zero, SPEC).dequantize() - weight
        true.append(float(torch.einsum("nk,kl,nl->", wrong, folded, wrong)))
    assert true[foreseen.index(min(foreseen))] < 1.1 * min(true) < 0.5 * true[0]
    assert foreseen == pytest.approx(true, rel=0.2)


@pytest.mark.parametrize("weighted", [False, True])
def test_column_cost_adds_what_rounded_tokens_cost(weighted):
    """As rounding them costs in truth, of outputs weighted by token; E[|x|^2] is of as many."""
    block = Block(outliers=15.0)
    pair = Pair(block, Smooth("norm", ("reader",)), head_dim=64)
    weights = torch.rand(100, 1) + 0.1 if weighted else None
    x = block.x if weights is None else block.x * weights.sqrt()
    factor = Factor.of(x.T @ x / 100, 0.01)
    noise = TokenNoise(block.x, weights, float(x.square().sum()) / 100)
    for scales in candidates(pair, block.x.abs().mean(0)):
        added = ColumnCost(pair, factor, SPEC, noise)(scales) - ColumnCost(pair, factor, SPEC)(scales)
        folded = block.x / scales
        wrong = (QuantizedTokens.of(folded).dequantize() - folded) @ (block.reader.weight * scales).T
        squares = wrong.square() if weights is None else wrong.square() * weights
        assert added == pytest.approx(float(squares.sum()) / 100, rel=0.2)
