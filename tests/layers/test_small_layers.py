"""Linear, RMSNorm, Embedding and MLP against the definitions in fp64."""

import math

import pytest
import torch

from qrt.definitions.activations import ACTIVATIONS
from qrt.layers.embedding import Embedding
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP
from qrt.layers.norm import LayerNorm, RMSNorm
from qrt.quant import affine
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(weight: torch.Tensor, scheme: str, bias: torch.Tensor | None = None) -> WeightData:
    """Round to nearest on the scheme's own grid."""
    spec = WEIGHT_SCHEMES[scheme].spec
    if spec is None:
        return WeightData(weight, bias=bias)
    scale, zero = affine.choose_qparams(weight, spec, torch.float32)
    codes = affine.quantize(weight, scale, zero, spec)
    return WeightData(codes, scale, zero, bias=bias, bits=spec.bits)


def plain(n: int, k: int, seed: int = 0) -> tuple[Linear, torch.Tensor]:
    weight = random(n, k, seed=seed)
    return Linear.pack("fp16", WeightData(weight), CPU, torch.float32), weight.double()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scheme", ["fp16", "w8a16", "w4a16"])
def test_linear_multiplies_by_the_canonical_weight(scheme, with_bias):
    bias = random(48, seed=2) if with_bias else None
    weight = quantized(random(48, 256, seed=1), scheme, bias)
    layer = Linear.pack(scheme, weight, CPU, torch.float32)
    x = random(5, 256, seed=3)
    truth = x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(layer(x).double(), truth, rtol=1e-5, atol=1e-4)
    assert sum(t.nbytes for t in layer.parameters()) >= (48 * 256 * (weight.bits or 32)) // 8


def test_linear_quantizes_activations_where_the_scheme_says():
    weight = quantized(random(48, 256, seed=1), "w8a8")
    layer = Linear.pack("w8a8", weight, CPU, torch.float32)
    x = random(5, 256, seed=3)
    codes, scale = affine.quantize_tokens(x)
    truth = (codes.double() * scale.double()) @ weight.dequantize().double().T
    torch.testing.assert_close(layer(x).double(), truth, rtol=1e-5, atol=1e-4)


def test_parameters_are_in_the_dtype_of_the_model():
    layer = Linear.pack("fp16", WeightData(random(4, 8), bias=random(4)), CPU, torch.bfloat16)
    assert [(tuple(p.shape), p.dtype) for p in layer.parameters()] == [
        ((4, 8), torch.bfloat16),
        ((4,), torch.bfloat16),
    ]


def test_rmsnorm_is_its_definition():
    weight, x = random(64, seed=1), random(7, 64, seed=2)
    wide = x.double()
    truth = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x).double(), truth, rtol=1e-5, atol=1e-6)


def test_rmsnorm_reads_heads_inside_a_fused_buffer():
    """q and k of a fused projection are strided views; the norm of each head is its own."""
    fused, weight = random(3, 6 * 32, seed=1), random(32, seed=2)
    q, _ = fused.unflatten(-1, (6, 32)).split((4, 2), dim=1)
    truth = torch.stack([RMSNorm(weight, 1e-6)(q[:, h].contiguous()) for h in range(4)], 1)
    torch.testing.assert_close(RMSNorm(weight, 1e-6)(q), truth)


def test_mlp_is_swiglu():
    gate_up, w = plain(2 * 96, 32, seed=1)
    down, v = plain(32, 96, seed=2)
    x = random(4, 32, seed=3)
    gate, up = (x.double() @ w.T).chunk(2, -1)
    truth = (gate * torch.sigmoid(gate) * up) @ v.T
    torch.testing.assert_close(MLP(gate_up, down)(x).double(), truth, rtol=1e-5, atol=1e-3)


def test_embedding_takes_rows():
    table = random(10, 4)
    rows = Embedding(table)(torch.tensor([3, 3, 9]), torch.arange(3))
    assert torch.equal(rows, table[[3, 3, 9]]) and rows.data_ptr() != table.data_ptr()


def test_embedding_scales_in_the_models_dtype_and_adds_positions():
    """In bf16 sqrt(3072) = 55.4256 is 55.5, as in transformers' Gemma."""
    table, places = random(10, 4).bfloat16(), random(7, 4, seed=1).bfloat16()
    tokens, positions = torch.tensor([3, 9]), torch.tensor([0, 4])
    scaled = Embedding(table, scale=3072**0.5)(tokens, positions)
    assert torch.equal(scaled, table[tokens] * torch.tensor(55.5, dtype=torch.bfloat16))
    placed = Embedding(table, positions=places, first=2)(tokens, positions)
    assert torch.equal(placed, table[tokens] + places[[2, 6]])


@pytest.mark.parametrize("heads", [(), (3,)])
def test_layernorm_is_its_definition(heads):
    weight, bias, x = random(*heads, 64, seed=1), random(64, seed=3), random(7, *heads, 64, seed=2)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    truth = (
        centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()
    )
    torch.testing.assert_close(LayerNorm(weight, bias, 1e-5)(x).double(), truth, rtol=1e-5, atol=1e-5)


def test_an_fp32_weight_multiplies_before_the_norm_is_rounded():
    weight, x = 1 + random(64, seed=1) / 4, random(7, 64, seed=2).bfloat16()
    wide = x.double()
    truth = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.equal(RMSNorm(weight, 1e-6)(x), truth.bfloat16())
    assert not torch.equal(RMSNorm(weight.bfloat16(), 1e-6)(x), truth.bfloat16())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_mlps(name, gated):
    gate_up, w = plain(96 * (1 + gated), 32, seed=1)
    down, v = plain(32, 96, seed=2)
    x = random(4, 32, seed=3)
    y = x.double() @ w.T
    act = {
        "silu": lambda y: y / (1 + (-y).exp()), "relu": lambda y: y.clamp(min=0),
        "relu2": lambda y: y.clamp(min=0) ** 2, "gelu": lambda y: y * (1 + torch.erf(y / 2**0.5)) / 2,
        "gelu_tanh": lambda y: y * (1 + torch.tanh((2 / math.pi) ** 0.5 * (y + 0.044715 * y**3))) / 2,
    }[name]  # fmt: skip
    inside = act(y[:, :96]) * y[:, 96:] if gated else act(y)
    got = MLP(gate_up, down, name, gated=gated)(x)
    torch.testing.assert_close(got.double(), inside @ v.T, rtol=1e-5, atol=1e-3)
