"""`linear` over torch's own packed layouts on a CPU."""

import pytest
import torch
from operators import check_operator

from qrt.config import ENV, KernelBackend
from qrt.kernels.linear import linear, prepare
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.quant.weight.w4a16.packed import block_rows
from random_weights import random_weight, relative


@pytest.mark.skipif(ENV.kernel_backend is not KernelBackend.AUTO, reason="what AUTO runs on a CPU")
@pytest.mark.parametrize(
    "scheme, bits, fields", [("w4a16", 4, 3), ("w8a16", 8, 3), ("w8a8", 8, 3), ("w4a8", 4, 3), ("fp16", 0, 1)]
)
def test_operator_over_torchs_layouts(scheme, bits, fields, monkeypatch):
    """`prepare` lays a weight out for torch's products on a CPU, and as tiles where kernels are asked for."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    if bits:
        group, steps = None if scheme == "w8a8" else 64, scheme == "w4a8"
        weight = random_weight(64, 128, bits, group, dtype=dtype, progressive=steps)
    else:
        weight = WeightData(torch.randn(64, 128))
    x, bias = torch.randn(3, 128).to(dtype), torch.randn(64).to(dtype)
    tensors = list(prepare(scheme, weight, cpu, dtype))
    assert len(tensors) == fields or not block_rows()
    check_operator("linear", (x, tensors, bias, scheme))
    y = linear(x, tensors, bias, scheme)
    monkeypatch.setattr("qrt.kernels.linear._PACKED_ON_CPU", False)
    tiles = prepare(scheme, weight, cpu, dtype)
    assert all(map(torch.equal, tiles, WEIGHT_SCHEMES[scheme].prepare(weight, cpu, dtype)))
    assert relative(y, WEIGHT_SCHEMES[scheme].linear_ref(x, tiles, bias).double()) < 2**-8
