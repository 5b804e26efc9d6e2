"""What training changes: Adam's steps on codes, scales and norms, and what would be stored."""

import pytest
import torch

from qrt.quant.affine import choose_qparams, dequantize, quantize
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight import WeightData
from qrt_calibrate.tuning import parameters
from qrt_calibrate.tuning.parameters import TunedNorm, TunedWeight

CPU = torch.device("cpu")


def quantized(symmetric, dtype=torch.float32):
    torch.manual_seed(0)
    spec = QuantSpec(4, symmetric, Granularity.GROUP, 16)
    weight = torch.randn(6, 32)
    scale, zero = choose_qparams(weight, spec, dtype)
    return WeightData(quantize(weight, scale, zero, spec), scale, zero, bits=4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_step_equals_adam_on_unrounded_codes(symmetric):
    """torch's own Adam, gradients by torch, on (codes - zero) * scale * gain."""
    data = quantized(symmetric)
    tuned = TunedWeight(data, torch.float32, CPU)
    codes = data.values.float().requires_grad_()
    gain = torch.ones_like(data.scale).requires_grad_()
    rates = [{"params": [codes], "lr": parameters.CODE_RATE}, {"params": [gain], "lr": parameters.SCALE_RATE}]
    adam = torch.optim.Adam(rates, betas=parameters.BETAS, eps=1e-12)
    for step in (1, 2, 3):
        gradient = torch.randn(6, 32)
        weight = dequantize(codes, data.scale * gain, data.zero, 4)
        adam.zero_grad()
        (weight * gradient).sum().backward()
        adam.step()
        tuned.follow(gradient, step, 1.0)
        with torch.no_grad():
            codes.clamp_(0, 15)
        torch.testing.assert_close(tuned.gain, gain.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tuned.codes, codes.detach(), rtol=1e-5, atol=1e-5)


def test_norm_step_equals_adam():
    weight = torch.randn(32).to(torch.bfloat16)
    tuned, gain = TunedNorm(weight, torch.float32, CPU), torch.ones(32).requires_grad_()
    adam = torch.optim.Adam([gain], lr=parameters.SCALE_RATE, betas=parameters.BETAS, eps=1e-12)
    for step in (1, 2, 3):
        gradient = torch.randn(32)
        adam.zero_grad()
        (weight.float() * gain * gradient).sum().backward()
        adam.step()
        tuned.follow(gradient, step, 1.0)
        torch.testing.assert_close(tuned.gain, gain.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(tuned.data(), (weight.float() * tuned.gain).to(torch.bfloat16))


def test_stored_weight_is_on_the_grid():
    tuned = TunedWeight(quantized(False, torch.bfloat16), torch.float32, CPU)
    before = tuned.data()
    assert torch.equal(before.values, quantized(False).values)
    for step in range(1, 61):
        tuned.follow(torch.ones(6, 32), step, 30.0)  # down as far as it goes
    after = tuned.data()
    assert after.values.max() == 0 and after.scale.dtype == torch.bfloat16
    assert torch.equal(after.zero, before.zero) and (after.scale > 0).all()
