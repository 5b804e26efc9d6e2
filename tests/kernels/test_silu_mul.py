"""`silu_mul` against fp64 and transformers' MLP; the Triton launcher runs on `device`."""

import pytest
import torch
from operators import check_operator

from backends import COMPILED
from qrt.kernels.silu_mul import kernel, ref, silu_mul, silu_mul_int8
from qrt.quant import affine

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# two roundings to the dtype; the interpreter truncates to bf16 instead of rounding
UNIT = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
BOUND = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7 if COMPILED else 2**-6}
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(y, gate_up):
    gate, up = gate_up.double().chunk(2, -1)
    want = gate * torch.sigmoid(gate) * up
    assert y.shape == want.shape and y.dtype == gate_up.dtype
    tiny = torch.finfo(y.dtype).smallest_normal * (1 + up.abs())  # silu is rounded first and may be subnormal
    assert ((y.double() - want).abs() <= BOUND[y.dtype] * want.abs() + tiny).all()


@pytest.mark.parametrize("implementation", [ref.silu_mul, kernel.silu_mul], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, width", [(1, 64), (7, 1024), (3, 1500), (2, 1), (0, 64), (33, 96)])
def test_matches_fp64(device, implementation, dtype, tokens, width):
    gate_up = (torch.randn(tokens, 2 * width, device=device) * 4).to(dtype)
    check(implementation(gate_up), gate_up)


@pytest.mark.ptx(dtype=[torch.bfloat16], implementation=[kernel])
@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, width", [(1, 64), (5, 1024), (3, 1500), (2, 1), (0, 64), (1, 14336)])
def test_int8_is_the_product_quantized(device, implementation, dtype, tokens, width):
    """Codes and scales bit for bit; a row of zeros has zeros."""
    device = CPU if implementation is ref else device  # on a GPU torch divides by a number inexactly
    gate_up = (torch.randn(tokens, 2 * width, device=device) * 4).to(dtype)
    gate_up[1:2] = 0
    assert_quantized(*implementation.silu_mul_int8(gate_up), implementation.silu_mul(gate_up))


def assert_quantized(codes, scale, y):
    want, want_scale = affine.quantize_tokens(y.cpu())
    assert codes.dtype == torch.int8 and torch.equal(codes.cpu(), want)
    assert scale.dtype == torch.float32 and torch.equal(scale.cpu(), want_scale[:, 0])


@pytest.mark.parametrize("implementation", [ref.silu_mul, kernel.silu_mul], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_ends(device, implementation, dtype):
    """silu is 0 far left and the identity far right; nothing overflows on the way."""
    gate = torch.tensor([-1e4, -200.0, -100.0, -30.0, 0.0, 30.0, 100.0, 200.0, 1e4], device=device)
    gate_up = torch.stack([gate, torch.full_like(gate, 2.0)]).flatten()[None].to(dtype)
    y = implementation(gate_up)[0]
    assert torch.allclose(y.float(), 2 * gate_up[0, :9].float().clamp(min=0), atol=1e-6, rtol=2**-7)


def test_strided_input(device):
    gate_up = torch.randn(6, 300, device=device)[::2, :256]
    check(kernel.silu_mul(gate_up), gate_up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_transformers(dtype):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48)).to(dtype)
    x = torch.randn(5, 32).to(dtype)
    activations = silu_mul(torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1))
    torch.testing.assert_close(mlp.down_proj(activations), mlp(x), rtol=2 * UNIT[dtype], atol=1e-6)


def test_operator():
    for name in ("silu_mul", "silu_mul_int8"):
        check_operator(name, [torch.randn(3, 64)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, width", [
    (1, 14336), pytest.param(8192, 14336, marks=pytest.mark.alone), (1000, 28672), (70000, 64),
])  # fmt: skip
def test_model_sizes(device, dtype, tokens, width):
    gate_up = torch.randn(tokens, 2 * width, device=device).to(dtype)
    y = silu_mul(gate_up)
    check(y, gate_up)
    assert_quantized(*silu_mul_int8(gate_up), y)
