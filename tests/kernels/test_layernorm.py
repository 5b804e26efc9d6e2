"""`layernorm` and its additions against fp64; the Triton launchers run on `device`."""

import pytest
import torch
from operators import check_operator

from backends import COMPILED
from qrt.kernels.layernorm import kernel, layernorm, ref
from qrt.quant import affine

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# one rounding to the dtype; the interpreter truncates to bf16 instead of rounding
BOUND = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7 if COMPILED else 2**-6}
AFFINE = [(True, True), (True, False), (False, False)]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def inputs(shape, dtype, device, affine=(True, True)):
    """Rows whose mean is as large as what they differ by."""
    gen = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=gen) + torch.randn(*shape[:-1], 1, generator=gen)
    weight, bias = torch.rand(shape[-1], generator=gen) + 0.5, torch.randn(shape[-1], generator=gen)
    given = weight.to(device, dtype) if affine[0] else None, bias.to(device, dtype) if affine[1] else None
    return x.to(device, dtype), *given


def check(y, x, weight, bias):
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    want = want if weight is None else want * weight.double()
    largest = want.abs() if bias is None else want.abs() + bias.double().abs()
    want = want if bias is None else want + bias.double()
    assert y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous()
    assert ((y.double() - want).abs() <= BOUND[x.dtype] * largest + 1e-5).all()


@pytest.mark.ptx(dtype=[torch.bfloat16], implementation=[kernel.layernorm], shape=[(17, 33)])
@pytest.mark.parametrize("implementation", [ref.layernorm, kernel.layernorm], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("shape", [(1, 64), (7, 4096), (17, 33), (5, 3, 128), (64,), (0, 64)])
def test_matches_fp64(device, implementation, dtype, affine, shape):
    x, weight, bias = inputs(shape, dtype, device, affine)
    check(implementation(x, weight, bias, EPS), x, weight, bias)


def test_heads_of_a_fused_projection(device):
    qkv, weight, bias = inputs((9, 12, 64), torch.float32, device)
    check(kernel.layernorm(qkv[:, :8], weight, bias, EPS), qkv[:, :8], weight, bias)


@pytest.mark.ptx(dtype=[torch.bfloat16], implementation=[kernel], shape=[(13, 1000)])
@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256), (13, 1000), (0, 64)])
def test_sums_are_normed_and_quantized(device, implementation, dtype, shape):
    """The residual in place, what is returned, and the codes of it; of split sums, too."""
    before, weight, bias = inputs(shape, dtype, device)
    x = torch.randn(2, *shape, device=device)
    for added in (x[0].to(dtype), x):
        whole = added if added.dim() == 2 else (x[0] + x[1]).to(dtype)
        residual, second = before.clone(), before.clone()
        y = implementation.add_layernorm(residual, added, weight, bias, EPS, None, 0.0, 0.5)
        exact = before.double() + whole.double() / 2
        near = BOUND[dtype] * (exact.abs() + whole.double().abs())
        assert ((residual.double() - exact).abs() <= near).all()
        check(y, residual, weight, bias)
        codes, scale = implementation.add_layernorm_int8(second, added, weight, bias, EPS, None, 0.0, 0.5)
        assert codes.dtype == torch.int8 and scale.dtype == torch.float32
        assert torch.equal(second, residual)
        if y.device.type == "cpu":  # on a GPU torch divides by a number inexactly
            want, want_scale = affine.quantize_tokens(y)
            assert torch.equal(codes, want) and torch.equal(scale, want_scale[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_transformers(dtype):
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm

    x, weight, _ = inputs((6, 256), dtype, "cpu")
    module = CohereLayerNorm(256, eps=EPS)
    module.weight.data = weight
    torch.testing.assert_close(layernorm(x, weight, None, EPS), module(x), rtol=BOUND[dtype], atol=1e-6)


def test_operators():
    """Schema (what is mutated, what is not) and fakes."""
    x, weight, bias = inputs((3, 64), torch.float32, "cpu")
    check_operator("layernorm", (x, weight, None, EPS))
    for name in ("add_layernorm", "add_layernorm_int8"):
        check_operator(name, (x.clone(), torch.randn(2, 3, 64), weight, bias, EPS, weight, EPS, 0.5))
