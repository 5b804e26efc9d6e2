"""Group scales split into channels and steps against exact fractions, and codes against the definition."""

from fractions import Fraction
from math import gcd

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qrt.errors import UnsupportedError
from qrt.quant import affine, progressive
from qrt.quant.weight import WEIGHT_SCHEMES
from random_weights import random_weight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def most_steps(zero: int) -> int:
    """Return the largest step with which no 4-bit code leaves int8."""
    return max(s for s in range(1, 17) if -128 <= -zero * s and (15 - zero) * s <= 127)


@st.composite
def rows(draw):
    """Return a channel's scale as an integer mantissa and an exponent, its steps and its zero points."""
    dtype = draw(st.sampled_from(DTYPES))
    kept = {torch.bfloat16: 4, torch.float16: 7, torch.float32: 20}[dtype]
    mantissa = draw(st.integers(2 ** (kept - 1), 2**kept - 1))
    exponent = draw(st.integers(-10 - kept, 3 - kept))
    zeros = draw(st.lists(st.integers(0, 15), min_size=1, max_size=70))
    steps = [draw(st.integers(0, most_steps(zero))) for zero in zeros]
    return dtype, Fraction(mantissa) * Fraction(2) ** exponent, steps, zeros


@settings(deadline=None)
@given(rows(), st.booleans())
def test_channel_and_steps_come_back(row, extra):
    """They are the exact divisor and quotients of a row; another row changes nothing."""
    dtype, channel, steps, zeros = row
    scale = torch.tensor([[float(channel * s) for s in steps]], dtype=torch.float64).to(dtype)
    assert [Fraction(value) for value in scale[0].tolist()] == [channel * s for s in steps]
    zero = torch.tensor([zeros], dtype=torch.uint8)
    if extra:
        scale, zero = torch.cat((scale, torch.ones_like(scale))), torch.cat((zero, zero))
    found = progressive.split(scale, zero)
    common = gcd(*steps)
    assert found.steps[0].tolist() == [s // max(common, 1) for s in steps]
    assert Fraction(found.channel[0].item()) == channel * common
    assert found.offsets[0].tolist() == [
        128 - z * s for z, s in zip(zeros, found.steps[0].tolist(), strict=True)
    ]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_times_channels_are_the_weight(dtype, symmetric):
    weight = random_weight(40, 256, 4, 32, symmetric=symmetric, dtype=dtype, progressive=True)
    weight.values[:, ::32], weight.values[:, 1::32] = 0, 15  # the codes that leave int8 first
    found = progressive.split(weight.scale, weight.zero)
    codes = found.codes(weight.values)
    assert codes.dtype == torch.int8 and found.steps.max() == 16 and codes.min() <= -120
    exact = codes.double() * found.channel.double()[:, None]
    assert torch.equal(exact.float(), weight.dequantize())


def test_a_row_of_zeros_has_no_channel():
    found = progressive.split(torch.zeros(2, 3), None)
    assert found.channel.tolist() == [0, 0] and not found.steps.any() and (found.offsets == 128).all()


@pytest.mark.parametrize(
    "scales, zeros, told",
    [
        ([1.0, 3.0], None, None), ([1.0, 16.0], None, None), ([2.0, 34.0], None, "got 34 in row 1, .* 17 s"),
        ([1.0, 16.0], [8, 7], "16 steps"), ([1.0, 15.0], [8, 7], None), ([1.0, 9.0], [8, 0], "9 steps"),
        ([1.0, 8.0], [8, 0], None), ([1.0, 8.0], [8, 15], None), ([1.0, 9.0], [8, 15], "9 steps"),
        ([1.0, 1.0078125], None, "128 steps"), ([1.0, 2.0**90], None, "got 1.2379.*e[+]27"),
        ([1.0, -1.0], None, "got -1 in .* no number of steps"), ([1.0, float("nan")], None, "got nan in"),
        ([float("inf"), 1.0], None, "got inf in"), ([2.0**-149, 2.0**-145], None, None),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(scales, zeros, told):
    scale = torch.tensor([[1.0, 1.0], scales])
    zero = None if zeros is None else torch.tensor([[8, 8], zeros], dtype=torch.uint8)
    if told is None:
        assert torch.equal(progressive.split(scale, zero).steps[0], torch.ones(2, dtype=torch.uint8))
        return
    with pytest.raises(UnsupportedError, match=f"group scales: expected .* int8, .*{told}.*--scheme w4a8"):
        progressive.split(scale, zero)


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.floats(2**-30, 2**10))
def test_rounded_channels_have_exact_steps(dtype, channel):
    rounded = progressive.round_channel(torch.tensor([channel]), dtype)
    products = rounded.double() * torch.arange(1, 17)
    assert torch.equal(products.to(dtype).double(), products) and rounded > 0
    if channel > 2**-10:
        kept = {torch.bfloat16: 4, torch.float16: 7, torch.float32: 20}[dtype]
        assert abs(rounded.item() - channel) <= channel * 2.0**-kept


def test_grids_of_rounded_weights_are_not_progressive():
    """Scales that are chosen group by group are refused, not rounded."""
    weight = random_weight(8, 256, 4, 64, dtype=torch.bfloat16).dequantize()
    scale, zero = affine.choose_qparams(weight, WEIGHT_SCHEMES["w4a16"].spec, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="group scales"):
        progressive.split(scale, zero)
