"""Products of MXFP4 weights by every kernel that takes tiles, against fp64 on the dequantized weight."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from linear_truth import HALF, UNIT, assert_rounded_once, triton_linear
from torch.nn import functional as F

from backends import COMPILED
from fake_gpu import fake_gpu, meta_weight
from qrt.kernels import chain
from qrt.kernels.act_mul.kernel import act_mul
from qrt.kernels.linear import choose, kernel
from qrt.kernels.linear.product import Kernel
from qrt.kernels.linear.tiles import plans as tile_plans
from qrt.kernels.linear.tiles import wide_kernel
from qrt.kernels.linear.tiles.device import constants_of
from qrt.quant import e2m1
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.device import unit_of
from qrt.quant.weight.tiles import PLACES, TiledWeight
from random_weights import random_mxfp4, reference, relative

MXFP4 = WEIGHT_SCHEMES["mxfp4"]
DTYPES = [torch.float32, *HALF]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@triton.jit
def _unpack(W, OUT, UNPACK: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    words = tl.load(W + i)
    for p in tl.static_range(4):
        tl.store(OUT + p * 65536 + i, UNPACK(words, 0, p, DTYPE, ASM).to(tl.float32) * unit_of(DTYPE, ASM))


@pytest.mark.ptx
@pytest.mark.parametrize("dtype", [tl.float32, tl.float16, tl.bfloat16], ids=str)
def test_every_word_unpacks_exactly(device, dtype):
    words = torch.arange(-32768, 32768, dtype=torch.int32, device=device)
    out = torch.empty(4, 65536, device=device)
    _unpack[(16,)](words.to(torch.int16), out, MXFP4.unpacker(), COMPILED, dtype)
    for place, plane in zip(PLACES[4], out, strict=True):
        assert torch.equal(plane, e2m1.numbers((words >> place) % 16))


# N, K, T: padded rows, ragged last tiles, one tile, a tile of 64 words, every block of tokens
CASES = [(64, 256, 1), (70, 160, 2), (1, 96, 7), (65, 32, 17), (130, 288, 33), (33, 416, 64), (70, 288, 70)]


@pytest.mark.ptx(n=[130, 65], dtype=HALF)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, k, tokens", CASES)
def test_products(device, n, k, tokens, dtype):
    """Of few tokens, and of more than a program takes, whose weight is dequantized first."""
    weight = random_mxfp4(n, k, device=device)
    x, bias = torch.randn(tokens, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    y = triton_linear(x, weight, bias, "mxfp4")
    assert y.shape == (tokens, n) and y.dtype == dtype
    assert relative(y, reference(x, weight, bias)) < max(2 * UNIT[dtype], 1e-6)
    if tokens <= 64 and (dtype == torch.float32 or COMPILED):  # scales multiply fp32 sums
        magnitude = x.double().abs() @ weight.dequantize().double().abs().T
        assert_rounded_once(y, reference(x, weight, bias), magnitude)


@pytest.mark.gpu
@pytest.mark.ptx(tokens=[20, 70], exponents=[(-70, -60), (36, 44)])
@pytest.mark.parametrize("tokens", [3, 20, 70])
@pytest.mark.parametrize("exponents", [(-70, -60), (10, 18), (36, 44)])
def test_scales_of_any_size(device, exponents, tokens):
    """Also those that numbers in units of bf16's smallest ones cannot be multiplied by."""
    weight = random_mxfp4(64, 256, exponents=exponents, device=device)
    x = torch.randn(tokens, 256, device=device).bfloat16()
    assert relative(triton_linear(x, weight, scheme="mxfp4"), reference(x, weight)) < 2 * UNIT[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.ptx(plan=[(64, 2, 2, 2, 2, 3, 2), (256, 2, 1, 1, 4, 2, 1, 1)], dtype=HALF[1:], scales=HALF[1:])
@pytest.mark.ptx(plan=[(64, 1, 1, 2, 2, 2, 2)], dtype=HALF[:1], scales=HALF[1:])
@pytest.mark.parametrize("plan", [
    (16, 1, 4, 2, 2, 2), (64, 2, 2, 2, 2, 3, 2), (128, 1, 3, 2, 4, 2), (64, 1, 1, 2, 2, 2, 2),
    (256, 2, 1, 1, 4, 2, 1, 1), (64, 4, 1, 2, 2, 2, 4),
])  # fmt: skip
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_wide_kernel(device, dtype, scales, plan):
    """In bf16 with scales that bf16's units cannot take; the weights are within the dtype."""
    n, k, tokens = 200, 672, 70
    large = scales is torch.float32 and dtype == torch.bfloat16
    weight = random_mxfp4(n, k, exponents=(16, 20) if large else (-5, 2), device=device)
    weight = replace(weight, scale=weight.scale.to(scales) if not large else weight.scale)
    tiled = TiledWeight(*MXFP4.prepare(weight, device, dtype))
    assert tiled.scale.dtype == scales
    x, bias = torch.randn(tokens, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    x = x / 2**18 if large else x
    y = torch.empty(tokens, n, device=device, dtype=dtype)
    constants = constants_of(tiled, 4, MXFP4.unpacker())
    wide_kernel.wide_product(x, tiled, bias, constants, tile_plans.WidePlan(*plan), None)(x, bias, y)
    assert relative(y, reference(x, weight, bias)) < 2 * UNIT[dtype]


@pytest.mark.ptx(dtype=HALF)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_up_in_one_kernel(device, monkeypatch, dtype):
    """It rounds the product as the plain kernel does, and then is act_mul of it."""
    plan = choose.Product(Kernel.FUSED, "", tile_plans.FusedPlan(2, 1, 4, 3))
    monkeypatch.setattr(choose, "tile_plan", lambda *_: plan)
    weight = random_mxfp4(256, 160, device=device)
    tensors = MXFP4.prepare(weight, device, dtype)
    x = torch.randn(5, 160, device=device).to(dtype) / 16
    both = kernel.linear(x, tensors, None, "mxfp4")
    y = kernel.linear_act(x, tensors, None, "mxfp4", "silu")
    assert relative(y, act_mul(both, "silu").double()) < 1e-6
    want = reference(x, weight)
    assert relative(y, F.silu(want[:, :128]) * want[:, 128:]) < max(3 * UNIT[dtype], 1e-6)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_kernels_of_integers_are_never_chosen(monkeypatch, tokens):
    """Sums of integers are not sums of floats, whatever else would fit."""
    fake_gpu(monkeypatch)
    monkeypatch.setattr(choose.digits_kernel, "fits", lambda *_: True)
    x = torch.empty(tokens, 2880, dtype=torch.bfloat16, device="meta")
    for scheme, digits in (("mxfp4", False), ("w4a16", True)):
        chosen = choose.choose(WEIGHT_SCHEMES[scheme], x, meta_weight(scheme, 2880, 5760))
        assert (chosen.kernel is Kernel.DIGITS) == digits
    weight = meta_weight("mxfp4", 64, 64)
    link = chain.Link(weight, weight, weight, weight, None, None, None, 1e-5, "mxfp4")
    monkeypatch.setattr(chain, "_takes", lambda *_: True)
    assert not chain.fits(64, x[:1, :64], link)
    assert chain.fits(64, x[:1, :64], link._replace(scheme="w4a16"))
    with pytest.raises(NotImplementedError, match="mxfp4 has no integers"):
        MXFP4.raw()
