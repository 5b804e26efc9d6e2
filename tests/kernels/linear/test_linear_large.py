"""`linear` on the GPU at the sizes of users, and beyond 2^31 words and outputs."""

import pytest
import torch
from linear_truth import UNIT

from qrt.kernels.linear import kernel
from qrt.kernels.linear.weight import Weight
from qrt.quant import affine
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from random_weights import random_weight, reference, relative

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LARGE = ("8B gate_up", "70B qkv", "70B gate_up", "70B down")  # gigabytes of fp64 beside each

SIZES = {
    "ragged": (1001, 3200), "0.6B o": (1024, 2048), "1B qkv": (3072, 2048),
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
    "70B qkv": (10240, 8192), "70B gate_up": (57344, 8192), "70B down": (8192, 28672),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n, k",
    [
        pytest.param(*size, id=name, marks=[pytest.mark.alone] * (name in LARGE))
        for name, size in SIZES.items()
    ],
)
@pytest.mark.parametrize(
    "scheme, symmetric", [("w4a16", False), ("w4a16", True), ("w8a16", True), ("w8a8", True)]
)
def test_sizes_of_users(device, scheme, symmetric, n, k):
    if scheme == "w8a8" and not symmetric:
        pytest.skip("w8a8 is symmetric")
    dtype, group = torch.bfloat16, None if scheme == "w8a8" else 128
    weight = random_weight(
        n, k, 4 if scheme == "w4a16" else 8, group, symmetric=symmetric, dtype=dtype, device=device
    )
    tensors = WEIGHT_SCHEMES[scheme].prepare(weight, device, dtype)
    matrix, kept = weight.dequantize().T, Weight(tensors)
    for tokens in (1, 2, 7, 16, 33, 64, 65, 128, 129, 301, 1001, 4096, 9001):
        x, bias = torch.randn(tokens, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
        if scheme == "w8a8":
            codes, scale = affine.quantize_tokens(x)
            want = (codes * scale) @ matrix + bias.float()
        else:
            want = x.float() @ matrix + bias.float()
        y = kernel.linear(x, tensors, bias, scheme)
        assert y.isfinite().all()
        assert relative(y, want.double()) < 2 * UNIT[dtype], tokens
        assert torch.equal(y, kernel.linear(x, tensors, bias, scheme)), tokens
        for _ in range(2):
            assert torch.equal(y, kernel.linear(x, kept, bias, scheme)), tokens


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("scheme, bits, per_word", [("w4a16", 4, 4), ("w8a16", 8, 2), ("w8a8", 8, 1)])
def test_weights_of_more_than_2_to_the_31_words(device, scheme, bits, per_word):
    """The first and the last outputs are those of their rows alone."""
    k, dtype = 8192, torch.bfloat16
    n = per_word * 2**31 // k + 77
    whole = random_weight(n, k, bits, None if scheme == "w8a8" else 128, dtype=dtype, device=device)
    ends = [WeightData(whole.values[rows].clone(), whole.scale[rows].clone(), bits=bits)
            for rows in (slice(100), slice(n - 100, n))]  # fmt: skip
    tensors = WEIGHT_SCHEMES[scheme].prepare(whole, device, dtype)
    assert tensors[0].numel() > 2**31
    del whole
    for tokens in (1, 33, 129, 701):
        x = torch.randn(tokens, k, device=device).to(dtype)
        seen = x
        if scheme == "w8a8":
            codes, scale = affine.quantize_tokens(x)
            seen = codes * scale
        y = kernel.linear(x, tensors, None, scheme)
        for part, end in zip((y[:, :100], y[:, -100:]), ends, strict=True):
            assert relative(part, reference(seen, end)) < 2 * UNIT[dtype], tokens


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("scheme, bits", [("w4a16", 4), ("w8a8", 8)])
def test_more_than_2_to_the_31_outputs(device, scheme, bits):
    n, k, dtype = 32771, 256, torch.bfloat16
    weight = random_weight(n, k, bits, dtype=dtype, device=device)
    tensors = WEIGHT_SCHEMES[scheme].prepare(weight, device, dtype)
    x = torch.randn(2**31 // n + 101, k, device=device).to(dtype)
    y = kernel.linear(x, tensors, None, scheme)
    assert y.numel() > 2**31
    for rows in (slice(101), slice(len(x) - 101, len(x))):
        want = WEIGHT_SCHEMES[scheme].linear_ref(x[rows], tensors, None)
        assert relative(y[rows], want.double()) < 2 * UNIT[dtype]
