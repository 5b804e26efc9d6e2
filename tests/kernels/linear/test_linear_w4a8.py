"""The products of W4A8 in Triton (the GPU, or the interpreter): int4 codes in progressive groups."""

import pytest
import torch
from linear_truth import UNIT, assert_rounded_once, triton_linear

from qrt.kernels.act_mul.kernel import act_mul_int8
from qrt.kernels.gpu import is_hopper
from qrt.kernels.linear import choose, kernel
from qrt.kernels.linear.product import Kernel
from qrt.kernels.linear.tiles import plans
from qrt.quant import affine
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES
from random_weights import random_weight

pytestmark = pytest.mark.usefixtures("poisoned_memory")
W4A8 = WEIGHT_SCHEMES["w4a8"]


def progressive(n, k, group, device, dtype=torch.bfloat16, **kind):
    return random_weight(n, k, 4, group, progressive=True, dtype=dtype, device=device, **kind)


def operands(n, k, tokens, device):
    """Codes and scales of tokens, a weight in groups of 128, and its run-time tensors."""
    weight = progressive(n, k, 128, device, symmetric=False)
    codes, scale = affine.quantize_tokens(torch.randn(tokens, k, device=device).bfloat16())
    return codes, scale, weight, list(W4A8.prepare(weight, device, torch.bfloat16))


def exact(codes, scale, weight):
    """The product of codes, in fp64."""
    return (codes.double() @ weight.dequantize().double().T) * scale.double().view(-1, 1)


def set_plan(monkeypatch, n, k, tokens, plan):
    key = plans.int8_tuning_key(k, n, plans.width_of(tokens))
    monkeypatch.setattr(choose, "configs", lambda device: {key: ["wide", *plan]} if plan else {})


@pytest.mark.ptx(tokens=[40, 100, 200])
@pytest.mark.usefixtures("copies", "small_gpu")
@pytest.mark.parametrize("tokens, plan", [
    (17, (32, 1, 1, 2, 4, 4)), (40, (64, 2, 1, 2, 4, 2, 2)), (64, (64, 1, 3, 1, 4, 3)),
    (40, (64, 1, 2, 2, 4, 4, 2)), (100, (128, 2, 1, 2, 4, 2, 1, 1)), (300, (128, 4, 1, 1, 4, 2, 2, 1)),
    (300, (256, 2, 1, 2, 4, 4, 1, 1)), (200, (256, 2, 1, 1, 4, 3)), (9, (16, 4, 1, 2, 4, 3, 4, 1)),
    (129, (128, 2, 2, 4, 2, 2)), (50, (64, 1, 1, 4, 2, 2)),
])  # fmt: skip
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_kind_of_plan(device, monkeypatch, tokens, plan, symmetric):
    """Splits, several groups, groups that take turns, programs that take blocks in turn."""
    if not is_hopper(device) and tokens not in (17, 129):
        pytest.skip("the kernel of any GPU has no plan")
    n, k = 200, 1152
    set_plan(monkeypatch, n, k, tokens, plan)
    weight = progressive(n, k, 128, device, symmetric=symmetric)
    x = torch.randn(tokens, k, device=device).bfloat16()
    codes, scale = affine.quantize_tokens(x.cpu())
    want = exact(codes.to(device), scale.to(device), weight)
    bias = torch.randn(n, device=device).bfloat16()
    got = triton_linear(x, weight, bias, scheme="w4a8") if tokens > 16 else None
    if got is not None:
        assert_rounded_once(got, want + bias.double(), want.abs() + bias.double().abs())
    tokens = QuantizedTokens(codes.to(device), scale.to(device).flatten(), torch.bfloat16)
    tensors = list(W4A8.prepare(weight, device, torch.bfloat16))
    got = kernel.linear_int8(*tokens[:2], tensors, None, "w4a8", torch.bfloat16)
    assert_rounded_once(got, want, want.abs())
    assert not tensors[4].any()


@pytest.mark.ptx(group=[64])
@pytest.mark.parametrize("tokens, group, k", [
    (3, 64, 512), (33, 32, 416), (80, 64, 448), (17, 640, 640), (20, 128, 384),
])  # fmt: skip
def test_groups_that_hopper_does_not_take(device, tokens, group, k):
    """By the kernel of any GPU, which takes all of them where there is no Hopper GPU."""
    n = 150
    weight = progressive(n, k, group, device, symmetric=False)
    x = torch.randn(tokens, k, device=device).bfloat16()
    codes, scale = affine.quantize_tokens(x.cpu())
    want = exact(codes.to(device), scale.to(device), weight)
    tensors = list(W4A8.prepare(weight, device, torch.bfloat16))
    own = codes.to(device), scale.to(device).flatten()
    chosen = choose.choose(W4A8, QuantizedTokens(*own, torch.bfloat16), tensors)
    assert (chosen.kernel is Kernel.TILES_INT8) == (group < 128 or not is_hopper(device))
    got = kernel.linear_int8(*own, tensors, None, "w4a8", torch.bfloat16)
    assert_rounded_once(got, want, want.abs())
    partial_sums = kernel.linear_int8_partial(*own, tensors, "w4a8")
    assert partial_sums.dtype == torch.float32 and not tensors[4].any()
    torch.testing.assert_close(partial_sums.double().sum(0), want, rtol=1e-5, atol=1e-5)


@pytest.mark.ptx(tokens=[60])
@pytest.mark.parametrize("tokens, plan", [(60, (64, 1, 3, 2, 4, 3)), (20, (32, 1, 2, 2, 4, 4, 2)), (0, None)])
def test_shares_sum_up_to_the_product(device, monkeypatch, tokens, plan):
    n, k = 150, 1536
    set_plan(monkeypatch, n, k, tokens, plan)
    codes, scale, weight, tensors = operands(n, k, tokens, device)
    partial_sums = kernel.linear_int8_partial(codes, scale.flatten(), tensors, "w4a8")
    if is_hopper(device) and plan:
        assert len(partial_sums) == plan[2]
    assert partial_sums.shape[1:] == (tokens, n) and not tensors[4].any()
    torch.testing.assert_close(
        partial_sums.double().sum(0), exact(codes, scale, weight), rtol=1e-5, atol=1e-5
    )


@pytest.mark.ptx(tokens=[40])
@pytest.mark.parametrize("tokens, plan", [
    (40, (64, 2, 1, 2, 4, 3, 2)), (130, (128, 4, 1, 2, 3, 2, 2, 1)), (18, (32, 1, 1, 2, 4, 4)),
    (140, (256, 2, 1, 1, 4, 3, 1, 1)),
])  # fmt: skip
def test_gate_times_up(device, monkeypatch, tokens, plan):
    """In the product's epilogue or behind it: the codes of what is rounded to bf16 in between."""
    n, k = 256, 512
    set_plan(monkeypatch, n, k, tokens, plan)
    codes, scale, _, tensors = operands(n, k, tokens, device)
    args = codes, scale.flatten(), tensors, None, "w4a8", torch.bfloat16
    got, got_scale = kernel.linear_act_int8(*args, "silu")
    want, want_scale = act_mul_int8(kernel.linear_int8(*args), "silu")
    assert (got.int() - want.int()).abs().max() <= 1
    torch.testing.assert_close(got_scale, want_scale, rtol=2 * UNIT[torch.bfloat16], atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 300])
def test_few_tokens_keep_16_bits(device, tokens):
    """As digits, where the GPU has them; more are rounded to int8, as the scheme's definition says."""
    weight = progressive(384, 512, 128, device, symmetric=False)
    x = torch.randn(tokens, 512, device=device).bfloat16()
    tensors = list(W4A8.prepare(weight, device, torch.bfloat16))
    y = kernel.linear(x, tensors, None, "w4a8")
    if tokens <= 16 and is_hopper(device):
        want = x.double() @ weight.dequantize().double().T
    else:
        codes, scale = affine.quantize_tokens(x)
        want = exact(codes, scale, weight)
    assert (y.double() - want).norm() < 4e-3 * want.norm()
