"""What tests of the linear kernels compare with, and within what."""

import torch

from backends import COMPILED
from qrt.kernels.linear import kernel
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData

HALF = [torch.float16, torch.bfloat16]
# largest relative error of one rounding; the interpreter truncates to bf16 instead of rounding
UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8 if COMPILED else 2**-7}


def triton_linear(x, weight: WeightData, bias=None, scheme: str | None = None):
    scheme = scheme or f"w{weight.bits}a16"
    return kernel.linear(x, WEIGHT_SCHEMES[scheme].prepare(weight, x.device, x.dtype), bias, scheme)


def assert_rounded_once(y, want, magnitude):
    """Within one rounding of y's dtype of the fp64 result, and fp32 rounding of its sum of `magnitude`."""
    assert y.isfinite().all()
    slack = UNIT[y.dtype] * want.abs() + 4e-6 * magnitude + 1e-7
    assert ((y.double() - want).abs() <= slack).all()
