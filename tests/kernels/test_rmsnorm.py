"""`rmsnorm` and `add_rmsnorm` against fp64 and transformers' module; the Triton launchers run on `device`."""

import pytest
import torch
from operators import check_operator

from backends import COMPILED
from qrt.kernels.rmsnorm import add_normed, add_rmsnorm, add_rmsnorm_int8, kernel, ref, rmsnorm
from qrt.quant import affine

CPU = torch.device("cpu")
EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# two roundings to the dtype; the interpreter truncates to bf16 instead of rounding
BOUND = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7 if COMPILED else 2**-6}


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def norm64(x, weight):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check(y, x, weight):
    want = norm64(x, weight)
    assert y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous()
    assert ((y.double() - want).abs() <= BOUND[x.dtype] * want.abs() + 1e-7).all()


def inputs(shape, dtype, device):
    gen = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=gen) * (torch.rand(*shape[:-1], 1, generator=gen) * 4 + 0.01)
    return x.to(device, dtype), (torch.rand(shape[-1], generator=gen) + 0.5).to(device, dtype)


@pytest.mark.parametrize("implementation", [ref.rmsnorm, kernel.rmsnorm], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 4096), (17, 33), (5, 3, 128), (2, 3, 4, 96), (64,), (0, 64)])
def test_matches_fp64(device, implementation, dtype, shape):
    x, weight = inputs(shape, dtype, device)
    check(implementation(x, weight, EPS), x, weight)


@pytest.mark.parametrize("implementation", [ref.rmsnorm, kernel.rmsnorm], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_fused_projection(device, implementation, dtype):
    """q and k are views of qkv: their rows lie apart in memory in two strides."""
    qkv, _ = inputs((9, (8 + 2 + 2) * 64), dtype, device)
    heads = qkv.view(9, 12, 64)
    weight = torch.rand(64, device=device).to(dtype)
    for part in (heads[:, :8], heads[:, 8:10], heads[::2, 1:8:3]):
        check(implementation(part, weight, EPS), part, weight)
    apart = qkv[:, :768].view(9, 64, 12).transpose(1, 2)  # not even the rows are dense
    check(implementation(apart, weight, EPS), apart, weight)


@pytest.mark.parametrize("implementation", [ref.embed_rmsnorm, kernel.embed_rmsnorm], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, width", [(1, 4096), (33, 64), (13, 1000), (0, 64)])
def test_rows_of_a_table(device, implementation, dtype, tokens, width):
    table, weight = inputs((50, width), dtype, device)
    ids = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
    rows, y = implementation(ids, table, weight, EPS)
    assert torch.equal(rows, table[ids]) and rows.is_contiguous()
    check(y, rows, weight)
    scaled, y = implementation(ids, table, weight.float(), EPS, 55.5)
    if COMPILED or dtype != torch.bfloat16:
        assert torch.equal(scaled, table[ids] * 55.5)
    check(y, scaled, weight)


@pytest.mark.parametrize("implementation", [ref.add_rmsnorm, kernel.add_rmsnorm], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256), (13, 1000), (0, 64)])
def test_residual_is_added_in_place(device, implementation, dtype, shape):
    residual, weight = inputs(shape, dtype, device)
    x, before = torch.randn(shape, device=device).to(dtype), residual.clone()
    y = implementation(residual, x, weight, EPS)
    exact = before.double() + x.double()
    assert ((residual.double() - exact).abs() <= BOUND[dtype] * exact.abs()).all()
    check(y, residual, weight)


def weights(dtype, k, device):
    """Of a norm behind a block and of the one that reads the sum: in the dtype, in fp32, absent."""
    own = inputs((k,), dtype, device)[1]
    wide = own.float() * 1.0001  # no number of 16 bits
    return [(own, own), (wide, own), (wide, wide), (own, None), (None, wide), (None, None)]


@pytest.mark.pairs
@pytest.mark.ptx(dtype=[torch.bfloat16], implementation=[kernel], shape=[(13, 1000)])
@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256), (13, 1000), (0, 64)])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_what_is_added_is_normed_and_scaled(device, implementation, dtype, shape, scale):
    """residual += scale * norm(x), and the norm of that, each rounded."""
    x, before = (inputs(shape, dtype, device)[0] for _ in range(2))
    for inner, weight in weights(dtype, shape[-1], device):
        added = inner, 1e-3, scale
        residual, second = before.clone(), before.clone()
        implementation.add_normed(residual, x, *added)
        wide = x.double()
        if inner is not None:
            wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * inner.double()
        wide *= scale
        error = BOUND[dtype] * (before.double() + wide).abs() + 3 * BOUND[dtype] * wide.abs()
        assert ((residual.double() - before.double() - wide).abs() <= error).all()
        codes, token_scale = implementation.add_rmsnorm_int8(second, x, weight, EPS, *added)
        exact = (
            device.type == "cpu" or dtype != torch.float32
        )  # two kernels may contract a * b + c differently
        assert ((second.double() - residual.double()).abs() <= (0 if exact else error)).all()
        y = residual
        if weight is not None:
            y = implementation.add_rmsnorm(before.clone(), x, weight, EPS, *added)
            check(y, residual, weight)
        # on a GPU torch divides by a number inexactly
        if device.type == "cpu" or (implementation is kernel and exact):
            assert_quantized(codes, token_scale, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_behind_a_block_is_rounded_before_it_is_added(dtype):
    """As in Gemma: 1 + weight multiplies in fp32, the norm is rounded, then it is added."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    x, weight = inputs((6, 256), dtype, "cpu")
    module, residual = Gemma2RMSNorm(256, eps=EPS), inputs((6, 256), dtype, "cpu")[0]
    module.weight.data = weight
    want = residual + module(x)
    add_normed(residual, x, 1 + weight.float(), EPS)
    assert torch.equal(residual, want)


@pytest.mark.ptx(dtype=[torch.bfloat16], implementation=[kernel])
@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256), (13, 1000), (3, 4096), (5, 1), (0, 64)])
def test_int8_is_the_norm_quantized(device, implementation, dtype, shape):
    """Codes and scales bit for bit, and the residual."""
    device = CPU if implementation is ref else device  # on a GPU torch divides by a number inexactly
    residual, weight = inputs(shape, dtype, device)
    x, other = torch.randn(shape, device=device).to(dtype), residual.clone()
    y = implementation.add_rmsnorm(residual, x, weight, EPS)
    codes, scale = implementation.add_rmsnorm_int8(other, x, weight, EPS)
    assert torch.equal(residual, other)
    assert_quantized(codes, scale, y)


def assert_quantized(codes, scale, y):
    want, want_scale = affine.quantize_tokens(y.cpu())
    assert codes.dtype == torch.int8 and torch.equal(codes.cpu(), want)
    assert scale.dtype == torch.float32
    if y.is_cuda and y.dtype is torch.float32:  # two kernels, whose sums of squares may differ in a bit
        torch.testing.assert_close(scale.cpu(), want_scale[:, 0], rtol=2**-22, atol=0)
    else:
        assert torch.equal(scale.cpu(), want_scale[:, 0])


@pytest.mark.parametrize("dtype", DTYPES if COMPILED else DTYPES[:2])  # the interpreter truncates to bf16
@pytest.mark.parametrize("partial_sums, rows, k", [(1, 3, 64), (2, 5, 300), (8, 1, 4096), (3, 0, 64)])
def test_shares_of_what_is_added(device, dtype, partial_sums, rows, k):
    """Their sum, from the first to the last and rounded once, is x."""
    x = torch.randn(partial_sums, rows, k, device=device)
    residual, weight = inputs((rows, k), dtype, device)
    total = torch.zeros_like(x[0])
    for share in x:
        total += share
    for operator in (kernel.add_rmsnorm, kernel.add_rmsnorm_int8):
        one, other = residual.clone(), residual.clone()
        got, want = operator(one, x, weight, EPS), operator(other, total.to(dtype), weight, EPS)
        assert torch.equal(one, other)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        operator(one, x, weight, EPS, weight, EPS, 0.5)
        operator(other, total.to(dtype), weight, EPS, weight, EPS, 0.5)
        assert torch.equal(one, other)
    if not rows:
        return
    near, got = (add(residual.clone(), x, weight, EPS) for add in (ref.add_rmsnorm, kernel.add_rmsnorm))
    torch.testing.assert_close(got, near, rtol=0.02, atol=0.02)  # of sums in another order


def test_rows_of_a_wider_residual(device):
    wide = torch.randn(5, 96, device=device)
    residual, x, weight = wide[:, :64], torch.randn(64, 5, device=device).T, torch.ones(64, device=device)
    want, beside = residual + x, wide[:, 64:].clone()
    check(kernel.add_rmsnorm(residual, x, weight, EPS), want, weight)
    assert torch.equal(residual, want) and torch.equal(wide[:, 64:], beside)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_transformers(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight = inputs((6, 256), dtype, "cpu")
    module = LlamaRMSNorm(256, eps=EPS)
    module.weight.data = weight
    assert torch.equal(rmsnorm(x, weight, EPS), module(x))


def test_operators():
    """Schema (what is mutated, what is not) and fakes."""
    x, weight = torch.randn(3, 2, 64), torch.rand(64)
    check_operator("rmsnorm", (x, weight, EPS))
    check_operator("rmsnorm", (torch.randn(3, 4, 64)[:, 1:3], weight, EPS))
    check_operator("embed_rmsnorm", (torch.tensor([2, 0]), torch.randn(3, 64), weight, EPS, 2.0))
    for shape in ((3, 64), (2, 3, 64)):
        arguments = (torch.randn(3, 64), torch.randn(shape), weight, EPS)
        for added in ((), (weight, EPS, 0.5)):
            check_operator("add_rmsnorm", (*arguments, *added))
            check_operator("add_rmsnorm_int8", (*arguments, *added))
            check_operator("add_normed", (*arguments[:2], *added))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 64, 1000, pytest.param(8192, marks=pytest.mark.alone)])
@pytest.mark.parametrize("k", [4096, 8192, 5120, 28672])
def test_model_sizes(device, dtype, tokens, k):
    x, weight = torch.randn(tokens, k, device=device).to(dtype), torch.rand(k, device=device).to(dtype)
    check(rmsnorm(x, weight, EPS), x, weight)
    residual = torch.randn(tokens, k, device=device).to(dtype)
    total, other = residual + x, residual.clone()
    y = add_rmsnorm(residual, x, weight, EPS)
    check(y, total, weight)
    assert torch.equal(residual, total)
    codes, scale = add_rmsnorm_int8(other, x, weight, EPS)
    assert torch.equal(other, total)
    # on a GPU the two sums of squares may be added in different orders: y may be off by a rounding
    rounding, step = 2 * BOUND[dtype] * y.double().abs(), scale.double()[:, None]
    assert ((codes.double() * step - y.double()).abs() <= 0.5001 * step + rounding).all()
    peak = y.double().abs().amax(1) / 127
    assert ((scale.double() - peak).abs() <= 2 * BOUND[dtype] * peak).all()


@pytest.mark.gpu
def test_heads_of_many_tokens(device):
    qkv = torch.randn(8192, 80 * 128, device=device).bfloat16()
    weight = torch.rand(128, device=device).bfloat16()
    part = qkv.view(8192, 80, 128)[:, :64]
    check(rmsnorm(part, weight, EPS), part, weight)
