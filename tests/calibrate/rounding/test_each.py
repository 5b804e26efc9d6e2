"""Weights of several experts are rounded at once as each is alone."""

import pytest
import torch

from qrt.quant.affine import choose_qparams, dequantize
from qrt.quant.spec import Granularity, QuantSpec
from qrt_calibrate.recipe.method import METHODS
from qrt_calibrate.recipe.recipe import LinearRecipe
from qrt_calibrate.rounding import each
from qrt_calibrate.rounding.clip import search_clip
from qrt_calibrate.rounding.each import round_each
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.gptq import round_columns
from qrt_calibrate.rounding.observe import Moments
from qrt_calibrate.steps.correct import Rounder
from qrt_calibrate.steps.figures import Figures

CPU = torch.device("cpu")


def inputs(count, k):
    """Moments of `count` inputs that differ, and the drift of each."""
    found = []
    for number in range(count):
        x = torch.randn(200, k) @ torch.randn(k, k) * torch.rand(k).add(0.1)
        own = Moments(k, None, CPU)
        for half, part in enumerate(x.chunk(2)):
            own.add(part, part + 0.05 * (number + 1) * torch.randn_like(part), len(x), half)
        found.append(own)
    return found


@pytest.mark.parametrize("rows", [4096, 20])  # on a CPU so many rows of experts are rounded at a time
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_those_of_each_alone(symmetric, rows, monkeypatch):
    monkeypatch.setattr(each, "CACHED_ROWS", rows)
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 32)
    weights = torch.randn(5, 16, 160)  # two blocks of columns, and a half
    factors = [Factor.of(own.hessian, 0.01, 0.1) for own in inputs(5, 160)]
    scale, zero = choose_qparams(weights, spec, torch.bfloat16)
    codes = round_each(weights, factors, scale, zero, spec)
    zeros = [None] * 5 if zero is None else zero
    for got, weight, factor, *grid in zip(codes, weights, factors, scale, zeros, strict=True):
        alone = round_columns(weight, factor, *grid, spec)
        assert (dequantize(got, *grid, 4) - alone.dequantize()).abs().max() < 1e-6


@pytest.mark.parametrize("elements", [1 << 19, 16 * 64, 100])
def test_clipping_is_that_of_each_alone(elements, monkeypatch):
    monkeypatch.setattr("qrt_calibrate.rounding.clip._BLOCK_ELEMENTS", elements)
    spec = QuantSpec(4, True, Granularity.GROUP, 32)
    weights, importance = torch.randn(3, 16, 64) ** 3, torch.rand(3, 64) ** 4
    found = search_clip(weights, importance, spec, torch.bfloat16)
    alone = [search_clip(*own, spec, torch.bfloat16) for own in zip(weights, importance, strict=True)]
    assert torch.equal(found, torch.stack(alone)) and (found < 1).any()


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_a_rounder_rounds_several_as_each(method):
    spec = QuantSpec(4, False, Granularity.GROUP, 32)
    rounder = Rounder(METHODS[method], torch.bfloat16, 0.1, Figures())
    weights, grid = torch.randn(4, 24, 64), LinearRecipe("w4a16", spec)
    torch.manual_seed(1)
    both = inputs(4, 64), (torch.manual_seed(1), inputs(4, 64))[1]  # the correction uses them up
    factors = [rounder.factor(own) for own in both[0]]
    several = rounder.round_each(iter(weights), both[0], factors, grid)
    for got, weight, own, factor in zip(several, weights, both[1], factors, strict=True):
        alone = rounder.round(weight, own, factor, None, grid)
        assert (got.dequantize() - alone.dequantize()).abs().max() < 1e-6 and got.bits == alone.bits
