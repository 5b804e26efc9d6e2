"""`Digits` as kernels write them, and `linear` by them, against their definitions."""

import pytest
import torch
from linear_truth import UNIT

from backends import COMPILED, GPU
from qrt.kernels.linear import kernel
from qrt.kernels.linear.tiles import digits_kernel
from qrt.kernels.linear.tiles.make_digits_kernel import make_digits
from qrt.kernels.rmsnorm import add_rmsnorm
from qrt.kernels.rmsnorm.kernel import add_rmsnorm_digits
from qrt.quant.digits import Digits, room_for
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.tiles import TiledWeight
from random_weights import random_weight, reference

EPS = 1e-5


def decoded(digits):
    """What `Digits` says of its tokens, fp64 [T, K], and half of each group's step."""
    high, low = digits.codes[:, :, : digits.tokens].double().unbind(1)
    scale, total = digits.facts[:, :, : digits.tokens].double()
    codes = 256 * high + low
    assert torch.equal(codes.sum(-1), total)
    by_input = codes.unflatten(-1, (64, 2)).transpose(-1, -2).flatten(-2) * scale[..., None]
    return by_input.transpose(0, 1).flatten(1), scale.T.repeat_interleave(128, 1) / 2


def spread(tokens, inputs, device):
    """Magnitudes from 1e-6 to 1e4, a group of zeros."""
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(3))
    x *= 10 ** torch.empty(tokens, inputs // 128, 1).uniform_(-6, 4).expand(-1, -1, 128).flatten(1)
    x[0, :128] = 0
    return x.to(device, torch.bfloat16 if COMPILED else torch.float32)


def written(x, room):
    """`Digits` by torch."""
    digits = Digits.empty(*x.shape, room, x.device)
    digits.write(x)
    return digits


MAKERS = pytest.mark.parametrize("make", [make_digits, written])


@MAKERS
@pytest.mark.parametrize("tokens, inputs, room", [(1, 128, 8), (3, 640, 8), (16, 1152, 16)])
def test_digits_hold_sixteen_bits_of_a_group(device, make, tokens, inputs, room):
    x = spread(tokens, inputs, device)
    digits = make(x, room)
    got, half = decoded(digits)
    torch.testing.assert_close(digits.read().double(), got, rtol=1e-6, atol=0)
    assert digits.codes.shape == (inputs // 128, 2, room, 128)
    assert ((got - x.double()).abs() <= 1.01 * half).all()
    largest = x.double().view(tokens, -1, 128).abs().amax(-1).repeat_interleave(128, 1)
    assert (half * 65024 <= 1.001 * largest.clamp(min=1e-30)).all()


@MAKERS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_digits_of_what_is_not_finite(device, make, value):
    x = spread(2, 384, device)
    x[1, 130] = value
    scale = make(x, 8).facts[0, :, :2]
    assert not scale[1, 1].isfinite()
    assert scale.isfinite().sum() == 5


@pytest.mark.ptx
@pytest.mark.parametrize("partial_sums", [0, 3])
def test_norms_leave_as_digits(device, partial_sums):
    """Of the sum that the plain norm rounds, in a residual that is the same."""
    tokens, inputs = 5, 384
    x, residual = spread(tokens, inputs, device), spread(tokens, inputs, device).flip(0)
    weight = torch.rand(inputs, device=device).to(x.dtype)
    parts = torch.randn(partial_sums, tokens, inputs, device=device) if partial_sums else x
    ours, theirs = residual.clone(), residual.clone()
    got, half = decoded(add_rmsnorm_digits(ours, parts, weight, EPS, 8))
    want = add_rmsnorm(theirs, parts, weight, EPS)
    assert torch.equal(ours, theirs)
    assert ((got - want.double()).abs() <= 1.01 * half).all()


@pytest.mark.gpu
@pytest.mark.ptx(biased=[True], tokens=[1, 3, 9])
@pytest.mark.usefixtures("poisoned_memory", "copies")
@pytest.mark.parametrize("n, k, tokens, splits", [
    (128, 5248, 3, 2), (192, 384, 9, 1), (320, 640, 9, 1), (128, 8192, 16, 4), (64, 128, 1, 1),
])  # fmt: skip
@pytest.mark.parametrize("symmetric, biased", [(True, False), (False, True)])
def test_few_tokens_by_digits(device, monkeypatch, n, k, tokens, splits, symmetric, biased):
    """As if the GPU had four multiprocessors: shares of K that meet, whole sums of some and of many programs.
    Within half a step of each input and one rounding; twice the same bits."""
    monkeypatch.setattr(digits_kernel, "multiprocessors", lambda device: 4)
    weight = random_weight(n, k, 4, 128, symmetric=symmetric, dtype=torch.bfloat16, device=device)
    tiled = TiledWeight(*WEIGHT_SCHEMES["w4a16"].prepare(weight, device, torch.bfloat16))
    x = (torch.randn(tokens, k, device=device) + 0.3).bfloat16()
    bias = torch.randn(n, device=device).bfloat16() if biased else None
    tiles, made = tiled.packed.shape[1], make_digits(x, room_for(tokens))
    assert digits_kernel.fits(x, tiled, 4) and -(-tiles // digits_kernel._share(made, tiled)) == splits
    first = kernel.linear(x, list(tiled), bias, "w4a16")
    assert first.shape == (tokens, n) and first.dtype == x.dtype
    half_steps = made.facts[0, :, :tokens].T.repeat_interleave(128, 1) / 2
    slack = (1.01 * half_steps + 4e-6 * x.abs()).double() @ weight.dequantize().double().abs().T
    want = reference(x, weight, bias)
    assert ((first.double() - want).abs() <= UNIT[x.dtype] * want.abs() + slack).all()
    for _ in range(3 if GPU else 1):
        assert torch.equal(kernel.linear(x, list(tiled), bias, "w4a16"), first)
    assert not tiled.arrivals.any()
