"""A few tokens times an unquantized weight, by one program a multiprocessor, against fp64."""

import pytest
import torch

from qrt.kernels.linear import hopper_16bit_kernel as kernel
from qrt.kernels.linear import linear
from qrt.kernels.linear.kernel import linear as triton_linear

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def operands(tokens, k, n, dtype, device, biased=False):
    gen = torch.Generator(device).manual_seed(tokens + k + n)
    x, weight = (torch.randn(*size, generator=gen, device=device).to(dtype) for size in ((tokens, k), (n, k)))
    return x, weight, torch.randn(n, generator=gen, device=device).to(dtype) if biased else None


def check(got, x, weight, bias):
    """Within a rounding of the result and what fp32 sums lose."""
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    eps = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[x.dtype]
    assert got.shape == want.shape and got.dtype == x.dtype
    sums = 2**-20 * (x.double().abs() @ weight.double().abs().T)
    assert ((got.double() - want).abs() <= 1.01 * eps * want.abs() + sums).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory", "copies")
@pytest.mark.ptx(dtype=[torch.bfloat16], tokens=[1, 16, 33], n=[1000])
@pytest.mark.ptx(dtype=[torch.float16], tokens=[17], n=[128, 72])
@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("k, n, biased", [(264, 1000, True), (64, 128, False), (1600, 72, True)])
def test_sizes(device, monkeypatch, dtype, tokens, k, n, biased):
    """K and N that end within a block; programs of some blocks, of one, of a part; few and many stages."""
    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 3)
    x, weight, bias = operands(tokens, k, n, dtype, device, biased)
    check(kernel.hopper_16bit_gemm(x, weight, bias), x, weight, bias)


@pytest.mark.gpu
@pytest.mark.alone
@DTYPES
@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("k, n", [(4096, 128256), (8192, 128256), (1024, 151936), (2048, 256000)])
def test_heads_of_users(device, dtype, tokens, k, n):
    x, weight, _ = operands(tokens, k, n, dtype, device)
    assert kernel.fits(x, weight)
    got = linear(x, [weight], None, "fp16")
    check(got, x, weight, None)
    assert torch.equal(got, linear(x, [weight], None, "fp16"))


def test_what_fits(device, monkeypatch):
    monkeypatch.setattr(kernel, "is_hopper", lambda device: True)
    x, weight, bias = operands(3, 64, 40, torch.bfloat16, device, True)
    many = weight.repeat(132 * 2 * 128 // 40 + 1, 1)
    assert kernel.fits(x, many)
    assert not kernel.fits(x.float(), many.float())
    assert not kernel.fits(x.repeat(22, 1), many)
    assert not kernel.fits(x[:0], many)
    assert not kernel.fits(x[:, :60], many[:, :60].contiguous())
    assert not kernel.fits(x, many.T.contiguous().T)
    monkeypatch.setattr(kernel, "is_hopper", lambda device: False)
    assert not kernel.fits(x, many)
    check(triton_linear(x, [weight], bias, "fp16"), x, weight, bias)
