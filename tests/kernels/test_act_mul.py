"""`act_mul` against the definitions in fp64 and transformers' MLP; the Triton launcher runs on `device`."""

import math

import pytest
import torch
from operators import check_operator

from backends import COMPILED
from qrt.definitions.activations import ACTIVATIONS
from qrt.kernels.act_mul import act_mul, act_mul_int8, kernel, ref
from qrt.quant import affine

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# two roundings to the dtype; the interpreter truncates to bf16 instead of rounding
UNIT = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
BOUND = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7 if COMPILED else 2**-6}
pytestmark = pytest.mark.usefixtures("poisoned_memory")


DEFINITIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


def check(y, x, act="silu", gated=True):
    gate, up = x.double().chunk(2, -1) if gated else (x.double(), torch.ones(()))
    want = DEFINITIONS[act](gate) * up
    assert y.shape == want.shape and y.dtype == x.dtype
    tiny = torch.finfo(y.dtype).smallest_normal * (1 + up.abs())  # act is rounded first and may be subnormal
    if act.startswith("gelu"):  # 1 + erf and 1 + tanh lose what is below fp32's last bit, as torch's do
        tiny = tiny + 2**-20 * (gate * up).abs()
    assert ((y.double() - want).abs() <= BOUND[y.dtype] * want.abs() + tiny).all()


@pytest.mark.pairs
@pytest.mark.ptx(dtype=[torch.bfloat16], implementation=[kernel.act_mul], tokens=[3])
@pytest.mark.parametrize("implementation", [ref.act_mul, kernel.act_mul], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("tokens, width", [(1, 64), (7, 1024), (3, 1500), (2, 1), (0, 64), (33, 96)])
def test_matches_fp64(device, implementation, dtype, act, tokens, width):
    """With a gate and without."""
    x = (torch.randn(tokens, 2 * width, device=device) * 4).to(dtype)
    check(implementation(x, act), x, act)
    check(implementation(x, act, False), x, act, gated=False)


def test_every_activation_has_a_definition():
    assert DEFINITIONS.keys() == ACTIVATIONS.keys()


@pytest.mark.pairs
@pytest.mark.ptx(dtype=[torch.bfloat16], implementation=[kernel])
@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, width", [(1, 64), (5, 1024), (3, 1500), (2, 1), (0, 64), (1, 14336)])
def test_int8_is_the_product_quantized(device, implementation, dtype, tokens, width):
    """Codes and scales bit for bit; a row of zeros has zeros."""
    device = CPU if implementation is ref else device  # on a GPU torch divides by a number inexactly
    gate_up = (torch.randn(tokens, 2 * width, device=device) * 4).to(dtype)
    gate_up[1:2] = 0
    for how in (("silu",), ("gelu_tanh",), ("relu2", False)):
        assert_quantized(*implementation.act_mul_int8(gate_up, *how), implementation.act_mul(gate_up, *how))


def assert_quantized(codes, scale, y):
    want, want_scale = affine.quantize_tokens(y.cpu())
    assert codes.dtype == torch.int8 and torch.equal(codes.cpu(), want)
    assert scale.dtype == torch.float32 and torch.equal(scale.cpu(), want_scale[:, 0])


@pytest.mark.parametrize("implementation", [ref.act_mul, kernel.act_mul], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [act for act in ACTIVATIONS if act != "relu2"])
def test_far_ends(device, implementation, dtype, act):
    """They are 0 far left and the identity far right; nothing overflows on the way."""
    gate = torch.tensor([-1e4, -200.0, -100.0, -30.0, 0.0, 30.0, 100.0, 200.0, 1e4], device=device)
    gate_up = torch.stack([gate, torch.full_like(gate, 2.0)]).flatten()[None].to(dtype)
    y = implementation(gate_up, act)[0]
    assert torch.allclose(y.float(), 2 * gate_up[0, :9].float().clamp(min=0), atol=1e-6, rtol=2**-7)


@pytest.mark.ptx(dtype=[torch.bfloat16], implementation=[kernel])
@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_oai_matches_fp64(device, implementation, dtype):
    """Gates above 7 and ups beyond 7 are clamped; a gate far left gives 0."""
    x = (torch.randn(9, 300, device=device) * 6).to(dtype)
    x[0, :3], x[1, 150:153] = torch.tensor([-200.0, 1e4, 7.0]), torch.tensor([-1e4, 1e4, -1.0])
    gate, up = x.double().chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    want = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    y = implementation.act_mul(x, "swiglu_oai")
    assert y.dtype == dtype
    assert ((y.double() - want).abs() <= BOUND[dtype] * want.abs() + 1e-6).all()
    if implementation is kernel:
        assert_quantized(*kernel.act_mul_int8(x, "swiglu_oai"), y)


def test_swiglu_oai_equals_transformers():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=16, num_local_experts=2))
    x = torch.randn(5, 32) * 6
    theirs = torch.stack(x.chunk(2, -1), -1).flatten(1)  # even columns are the gate
    torch.testing.assert_close(act_mul(x, "swiglu_oai"), experts._apply_gate(theirs))


def test_strided_input(device):
    gate_up = torch.randn(6, 300, device=device)[::2, :256]
    check(kernel.act_mul(gate_up, "silu"), gate_up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_transformers(dtype):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48)).to(dtype)
    x = torch.randn(5, 32).to(dtype)
    activations = act_mul(torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1), "silu")
    torch.testing.assert_close(mlp.down_proj(activations), mlp(x), rtol=2 * UNIT[dtype], atol=1e-6)


def test_operator():
    for name in ("act_mul", "act_mul_int8"):
        check_operator(name, [torch.randn(3, 64), "silu", True])
        check_operator(name, [torch.randn(3, 64), "relu2", False])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, width", [
    (1, 14336), pytest.param(8192, 14336, marks=pytest.mark.alone), (1000, 28672), (70000, 64),
])  # fmt: skip
def test_model_sizes(device, dtype, tokens, width):
    gate_up = torch.randn(tokens, 2 * width, device=device).to(dtype)
    for act in ("silu", "gelu_tanh"):
        y = act_mul(gate_up, act)
        check(y, gate_up, act)
        assert_quantized(*act_mul_int8(gate_up, act), y)
