"""GPTQ against its definition, and against what any rounding can at best do."""

import itertools

import pytest
import torch

from qrt.quant.affine import choose_qparams
from qrt.quant.spec import Granularity, QuantSpec
from qrt_calibrate.rounding import factor as factors
from qrt_calibrate.rounding import gptq
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.gptq import round_columns


def problem(n=6, k=64, tokens=200, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(tokens, k) @ (torch.eye(k) + 0.3 * torch.randn(k, k))
    return torch.randn(n, k), x.T @ x / tokens


def loss(weight, data, hessian):
    wrong = (data.dequantize() - weight).double()
    return torch.einsum("nk,kl,nl->n", wrong, hessian.double(), wrong)


def by_definition(weight, hessian, scale, zero, spec, damping):
    """Optimal brain surgeon, column after column, the inverse Hessian of what is left made anew each time."""
    weight, k = weight.double().clone(), weight.shape[1]
    damped = hessian.double().clone()
    damped.diagonal().mul_(1 + damping)
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    codes = torch.empty_like(weight)
    for position, column in enumerate(order):
        left = order[position:]
        inverse = torch.linalg.inv(damped[left][:, left])
        group = int(column) // (k // scale.shape[1])
        s, z = scale[:, group].double(), 8 if zero is None else zero[:, group].double()
        codes[:, column] = torch.round(weight[:, column] / s + z).clamp(0, spec.levels - 1)
        error = weight[:, column] - (codes[:, column] - z) * s
        weight[:, left] -= error[:, None] / inverse[0, 0] * inverse[0]
    return codes.to(torch.uint8)


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_those_of_the_definition(symmetric, monkeypatch):
    monkeypatch.setattr(gptq, "BLOCK", 24)  # blocks, the last one short
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 16)
    weight, hessian = problem()
    scale, zero = choose_qparams(weight, spec, torch.bfloat16)
    got = round_columns(weight.clone(), Factor.of(hessian, 0.01), scale, zero, spec)
    wanted = by_definition(weight, hessian, scale, zero, spec, 0.01)
    assert (got.values == wanted).float().mean() > 0.99  # ties of fp32 against fp64
    assert torch.equal(got.scale, scale) and (got.zero is None) == symmetric


@pytest.mark.parametrize("inputs", [None, 41])
def test_a_factor_by_halves_is_that_of_the_definition(monkeypatch, inputs):
    monkeypatch.setattr(factors, "LEAF", 5)
    monkeypatch.setattr(factors, "MOVED_ROWS", 7)
    hessian = problem()[1][:inputs, :inputs].contiguous()
    before = hessian.clone()
    factor = Factor.of(hessian, 0.01)
    ordered = hessian.double()[factor.order][:, factor.order]
    ordered.diagonal().mul_(1.01)
    wanted = torch.linalg.cholesky(torch.linalg.inv(ordered), upper=True)
    torch.testing.assert_close(factor.upper.double(), wanted, rtol=1e-3, atol=1e-4)
    assert torch.equal(factor.upper, factor.upper.triu()) and torch.equal(hessian, before)
    assert Factor.of(torch.full((12, 12), -1.0), 0.01) is None


def test_level_keeps_errors_out_of_a_nearly_silent_column():
    """Such a column could take over all errors if its grid reached far enough, which it does not."""
    spec = QuantSpec(4, False, Granularity.GROUP, 16)
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    x[:, 7] = 0.003 * x.sum(1)
    weight, hessian = torch.randn(64, 32), x.T @ x / 512
    scale, zero = choose_qparams(weight, spec, torch.bfloat16)
    walked = [Factor.of(hessian, 1e-3, level) for level in (0.0, 0.1)]
    without, with_level = (
        loss(weight, round_columns(weight.clone(), factor, scale, zero, spec), hessian).sum()
        for factor in walked
    )
    assert with_level < 0.8 * without


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_in_parts_are_the_same_rows(symmetric, monkeypatch):
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 16)
    weight, hessian = problem(n=12)
    scale, zero = choose_qparams(weight, spec, torch.bfloat16)
    factor = Factor.of(hessian, 0.01)
    whole = round_columns(weight, factor, scale, zero, spec)
    monkeypatch.setattr(gptq, "CACHED_ROWS", 5)
    assert torch.equal(round_columns(weight, factor, scale, zero, spec).values, whole.values)


@pytest.mark.parametrize("columns, rows, symmetric", [(32, 40, True), (24, 70, False)])
def test_the_kernel_rounds_as_the_loop_does(columns, rows, symmetric, device):
    """One launch for two blocks: codes, and errors / U_ii."""
    from qrt_calibrate.rounding.gptq_kernel import round_block

    torch.manual_seed(0)
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 16)
    block, scales = torch.randn(2, columns, rows), torch.rand(2, columns, rows) * 0.2 + 0.1
    zeros = None if symmetric else torch.randint(0, 16, (2, columns, rows)).float()
    upper = torch.triu(0.1 * torch.randn(2, columns, columns)) + torch.eye(columns)
    offsets = spec.midpoint if zeros is None else zeros
    wanted = gptq.round_block(block.clone(), scales, offsets, upper, spec)
    operands = [None if own is None else own.to(device) for own in (block, scales, zeros, upper)]
    found = round_block(*operands, spec.midpoint, spec.levels)
    same = found[0].cpu() == wanted[0]
    assert same.float().mean() > 0.999  # ties: a fused multiply-add may fall on the other side
    assert (found[1].cpu() - wanted[1])[:, :, same.all(1).all(0)].abs().max() < 1e-4


def test_near_the_best_of_all_roundings():
    """Four columns of 2 bits: every one of 256 code vectors is tried."""
    spec = QuantSpec(2, True, Granularity.CHANNEL)
    weight, hessian = problem(n=40, k=4, seed=1)
    scale, _ = choose_qparams(weight, spec, torch.float32)
    got = loss(weight, round_columns(weight.clone(), Factor.of(hessian, 1e-6), scale, None, spec), hessian)
    grid = torch.tensor(list(itertools.product(range(4), repeat=4))).double() - 2
    wrong = grid * scale.double()[:, None] - weight.double()[:, None]
    best = torch.einsum("nck,kl,ncl->nc", wrong, hessian.double(), wrong).amin(1)
    assert (got >= best * (1 - 1e-6)).all() and got.sum() < 1.5 * best.sum()


def test_inactive_channel_is_rounded_to_nearest_on_its_own():
    spec = QuantSpec(4, True, Granularity.GROUP, 16)
    weight, hessian = problem()
    hessian[5], hessian[:, 5] = 0, 0
    scale, _ = choose_qparams(weight, spec, torch.float32)
    data = round_columns(weight.clone(), Factor.of(hessian, 0.01), scale, None, spec)
    nearest = torch.round(weight[:, 5] / scale[:, 0] + 8).clamp(0, 15)
    assert torch.equal(data.values[:, 5].float(), nearest)
    other = weight.clone()
    other[:, 5] = 0
    again = round_columns(other, Factor.of(hessian, 0.01), scale, None, spec)
    keep = torch.arange(64) != 5
    assert torch.equal(data.values[:, keep], again.values[:, keep])


def test_the_factor_does_not_depend_on_the_scale_of_the_inputs():
    """A fold D^-1 H D^-1 with the same order has the factor U D: what the scale search relies on."""
    _, hessian = problem()
    scales = torch.exp2(torch.linspace(-0.1, 0.1, 64))
    order = Factor.of(hessian, 0.01).order
    hessian = hessian[order][:, order]
    plain, folded = Factor.of(hessian, 0.01), Factor.of(hessian / scales / scales[:, None], 0.01)
    assert torch.equal(plain.order, folded.order)
    torch.testing.assert_close(folded.upper, plain.upper * scales, rtol=1e-3, atol=1e-4)
    rows = torch.randn(3, 64)
    damped = hessian + 0.01 * torch.diag(hessian.diagonal())
    torch.testing.assert_close(plain.solve(rows), torch.linalg.solve(damped, rows.T).T, rtol=1e-3, atol=1e-3)


def test_singular_hessian_gets_more_damping_until_none_helps():
    x = torch.ones(3, 32)  # one direction only
    factor = Factor.of(x.T @ x, 0.001)
    assert factor is not None and factor.upper.isfinite().all()
    assert Factor.of(torch.full((4, 4), -1.0), 0.01) is None


def gradients_of(n, tokens=400, seed=3):
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.eye(n) + 0.5 * torch.randn(n, n, generator=generator)
    g = torch.randn(tokens, n, generator=generator) @ mixed
    return g.T @ g / tokens


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_are_those_of_the_definition(symmetric, monkeypatch):
    """Row after row, each by the definition above; those to come move by the same rule, turned round."""
    monkeypatch.setattr(gptq, "BLOCK", 16)
    monkeypatch.setattr(gptq, "ROW_BLOCKS", 12)  # every row is a block
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 16)
    weight, hessian = problem(n=12)
    felt = gradients_of(12)
    scale, zero = choose_qparams(weight, spec, torch.bfloat16)
    rows = [Factor.of(felt, 0.02)]
    got = round_columns(weight.clone(), Factor.of(hessian, 0.01), scale, zero, spec, rows)
    left, codes = weight.double().clone(), torch.empty_like(weight)
    damped = felt.double() * (1 + 0.02 * torch.eye(12))
    for position, row in enumerate(rows[0].order):
        zeros = None if zero is None else zero[row][None]
        codes[row] = by_definition(left[row][None], hessian, scale[row][None], zeros, spec, 0.01)[0].float()
        z = 8 if zero is None else zero[row].repeat_interleave(16).double()
        error = left[row] - (codes[row] - z) * scale[row].repeat_interleave(16).double()
        behind = rows[0].order[position:]
        inverse = torch.linalg.inv(damped[behind][:, behind])
        left[behind] -= inverse[0][:, None] / inverse[0, 0] * error
    assert (got.values == codes).float().mean() > 0.98
    assert torch.equal(got.scale, scale) and (got.zero is None) == symmetric


def test_row_compensation_lowers_the_loss_and_runs_stay_separate():
    spec = QuantSpec(4, True, Granularity.GROUP, 16)
    weight, hessian = problem(n=64)
    felt = gradients_of(32), gradients_of(32, seed=4)
    scale, _ = choose_qparams(weight, spec, torch.float32)
    columns, rows = Factor.of(hessian, 0.01), [Factor.of(own, 0.02) for own in felt]
    plain = round_columns(weight, columns, scale, None, spec)
    both = round_columns(weight, columns, scale, None, spec, rows)

    def cost(data):
        wrong = data.dequantize() - weight
        return torch.einsum("mn,nk,kl,ml->", torch.block_diag(*felt), wrong, hessian, wrong)

    assert cost(both) < 0.85 * cost(plain)
    for run, own in ((slice(0, 32), rows[0]), (slice(32, 64), rows[1])):
        alone = round_columns(weight[run], columns, scale[run], None, spec, [own])
        assert torch.equal(alone.values, both.values[run])
