"""The search of progressive grids against all channel scales, steps and zero points of small rows."""

import pytest
import torch

from qrt.quant import affine, progressive
from qrt.quant.spec import Granularity, QuantSpec
from qrt_calibrate.rounding import progressive as search
from qrt_calibrate.rounding.clip import search_clip
from qrt_calibrate.rounding.grid import choose_grid
from qrt_calibrate.rounding.progressive import search_progressive

GROUP = 32


def grid(symmetric):
    return QuantSpec(4, symmetric, Granularity.GROUP, GROUP, progressive=True)


def rows(kind, n=6, groups=4):
    """Rows whose groups are alike, of many sizes, one-sided, or partly zero."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(n, groups, GROUP, generator=generator)
    if kind == "sizes":  # steps of 1 are too large for some
        weight *= torch.exp(2.0 * torch.randn(n, groups, 1, generator=generator))
    if kind == "sided":
        weight[:, 0], weight[:, 1] = weight[:, 0].abs(), -weight[:, 1].abs()
    if kind == "zeros":
        weight[0], weight[1, :2] = 0, 0
    return weight.flatten(1), torch.rand(groups * GROUP, generator=generator)


def error(weight, cost, scale, zero, spec):
    """Weighted squared error of each row, from the definition of the grid."""
    codes = affine.quantize(weight, scale, zero, spec)
    wrong = affine.dequantize(codes, scale, zero, 4) - weight
    return (wrong.double().square() * cost).sum(1)


def least(row, cost, spec):
    """Return the least error of a row over all it may be: values of c of 4 bits, steps, zero points."""
    groups, costs = row.view(-1, GROUP).double(), cost.view(-1, GROUP).double()
    best = torch.inf
    steps = torch.arange(1, 17.0)[:, None, None, None].double()
    zeros = torch.tensor([8.0] if spec.symmetric else range(16)).double()[:, None, None]
    fits = (zeros * steps <= 128) & ((15 - zeros) * steps <= 127)
    for exponent in range(-10, 1):  # 2^-10 * 15 * 16 is less than a quarter: too small for all rows
        for unit in range(8, 16):
            scale = unit * 2.0**exponent * steps
            codes = torch.clamp(torch.round(groups / scale) + zeros, 0, 15)
            wrong = (((codes - zeros) * scale - groups).square() * costs).sum(-1)
            best = min(best, float(wrong.masked_fill(~fits[..., 0], torch.inf).amin((0, 1)).sum()))
    return best


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["alike", "sizes", "sided", "zeros"])
def test_error_is_near_the_least_of_all_grids(kind, symmetric):
    weight, cost = rows(kind)
    spec = grid(symmetric)
    scale, zero = search_progressive(weight, cost, spec, torch.bfloat16)
    found = error(weight, cost, scale, zero, spec)
    wanted = torch.tensor([least(row, cost, spec) for row in weight], dtype=torch.float64)
    assert (found >= wanted * (1 - 1e-5)).all()
    worst = 1.02 if symmetric else 1.08  # zero points farther than 1 from a group's middle are not tried
    assert (found <= wanted * worst + 1e-12).all() and found.sum() < 1.03 * wanted.sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["alike", "sizes", "sided", "zeros"])
def test_scales_are_steps_of_a_channel(kind, symmetric, dtype):
    """Also of weights that are so small that fp16 scales end near its smallest."""
    for size in (1.0, 3e-5):
        weight, cost = rows(kind)
        scale, zero = search_progressive(weight * size, cost, grid(symmetric), dtype)
        found = progressive.split(scale, zero)
        assert scale.dtype == dtype and (found.steps >= 1).all() and (zero is None) == symmetric
        if kind == "sizes":
            assert found.steps.min() < 3 and found.steps.max() > 7


def test_weights_at_once_in_blocks_or_alone_are_alike(monkeypatch):
    weight, cost = rows("sizes", n=9)
    weights, costs = torch.stack([weight, weight.flip(0)]), torch.stack([cost, cost + 1])
    scale, zero = search_progressive(weights, costs, grid(False), torch.bfloat16)
    monkeypatch.setattr(search, "_BLOCK_ELEMENTS", 4 * weight.shape[1])
    for own in range(2):
        alone = search_progressive(weights[own], costs[own], grid(False), torch.bfloat16)
        assert torch.equal(scale[own], alone[0]) and torch.equal(zero[own], alone[1])


def test_a_grid_with_free_scales_is_hardly_better():
    """The one that w4a16 has, of bf16 scales and one zero point, by the same weighted error."""
    weight, cost = rows("alike", n=64)
    for symmetric in (True, False):
        spec = grid(symmetric)
        free = affine.choose_qparams(
            weight, spec, torch.bfloat16, search_clip(weight, cost, spec, torch.bfloat16)
        )
        own = choose_grid(weight, spec, torch.bfloat16, cost)
        errors = [float(error(weight, cost, *chosen, spec).sum()) for chosen in (free, own)]
        assert errors[1] < 1.02 * errors[0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_without_importance_all_columns_count_alike(symmetric):
    """With one zero point for a group, where there are any: rounding to nearest is rough enough."""
    weight, _ = rows("alike")
    ones, spec = torch.ones(weight.shape[1]), grid(symmetric)
    own = choose_grid(weight, spec, torch.bfloat16)
    alike = search_progressive(weight, ones, spec, torch.bfloat16)
    errors = [float(error(weight, ones, *chosen, spec).sum()) for chosen in (own, alike)]
    assert errors[0] == errors[1] if symmetric else errors[1] <= errors[0] < 1.1 * errors[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["alike", "sizes", "zeros"])
def test_the_gpu_searches_as_the_cpu(kind):
    """Sums of another order may prefer another grid of as small an error."""
    weight, cost = rows(kind)
    own = search_progressive(weight.cuda(), cost.cuda(), grid(False), torch.bfloat16)
    progressive.split(*own)
    cpu = search_progressive(weight, cost, grid(False), torch.bfloat16)
    found, wanted = (error(weight, cost, scale.cpu(), zero.cpu(), grid(False)) for scale, zero in (own, cpu))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-9)
