"""The products of W8A8 in Triton (the GPU, or the interpreter): tokens quantized, exact sums, gate and up."""

import pytest
import torch
from linear_truth import HALF, UNIT, assert_rounded_once, triton_linear
from operators import check_operator

from backends import COMPILED, GPU
from qrt.kernels.act_mul.kernel import act_mul_int8
from qrt.kernels.gpu import is_hopper
from qrt.kernels.linear import choose, kernel, ref
from qrt.kernels.linear.int8 import plans as int8_plans
from qrt.kernels.linear.int8.quantize_kernel import quantize_tokens
from qrt.quant import affine
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES
from random_weights import random_weight, relative

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def named(plan):
    """As the file of measured plans has it."""
    return ["block" if len(plan) == 6 else "hopper", *plan]


@pytest.mark.ptx(tokens=[70, 131, 16])
@pytest.mark.usefixtures("copies", "small_gpu")
@pytest.mark.parametrize("tokens, plan", [
    (5, (8, 32, 128, 4, 4, 4)), (33, (64, 64, 256, 2, 4, 4)), (101, (64, 64, 128, 4, 4, 4)),
    (131, (128, 64, 128, 2, 4, 4)), (259, (128, 128, 128, 1, 8, 3)), (131, (128, 256, 1, 4)),
    (300, (128, 128, 2, 4)), (70, (64, 128, 1, 6)), (513, (128, 64, 3, 6)), (9, (16, 128, 1, 6)),
    (16, (16, 64, 2, 8)), (30, (32, 128, 1, 4)), (131, (64, 64, 1, 8, 1)), (600, (128, 128, 1, 3, 2)),
    (131, (64, 64, 1, 12, 1)),
])  # fmt: skip
def test_every_kind_of_measured_int8_plan(device, monkeypatch, tokens, plan):
    if not COMPILED and len(plan) < 6 and tokens > 200:
        pytest.skip("Hopper's kernel; what the interpreter has in its place is above")
    n, k = 150, 1104
    key = int8_plans.tuning_key(k, n, int8_plans.width_of(tokens))
    monkeypatch.setattr(choose, "configs", lambda device: {key: named(plan)})
    weight, x = random_weight(n, k, 8, device=device), torch.randn(tokens, k, device=device)
    codes, scale = affine.quantize_tokens(x.cpu())  # on a GPU torch divides by a number inexactly
    sums = codes.long() @ (weight.values.long().cpu() - 128).T
    exact = (sums.double() * scale.double()).to(device) * weight.scale.double().T
    assert_rounded_once(triton_linear(x, weight, scheme="w8a8"), exact, exact.abs())


@pytest.mark.ptx(tokens=[60])
@pytest.mark.parametrize("tokens, plan", [
    (5, (8, 32, 128, 4, 4, 4)), (33, (64, 64, 256, 2, 4, 4)), (64, (64, 64, 128, 1, 4, 4)),
    (64, (64, 64, 2, 8)), (50, (64, 128, 4, 4)), (60, (64, 64, 1, 12)), (13, (16, 64, 2, 8)), (0, None),
])  # fmt: skip
def test_shares_sum_up_to_the_product(device, monkeypatch, tokens, plan):
    """As many as the plan splits K, each of its own inputs alone and rounded once."""
    n, k = 150, 1104
    key = int8_plans.tuning_key(k, n, int8_plans.width_of(tokens))
    monkeypatch.setattr(choose, "configs", lambda device: {key: named(plan)} if plan else {})
    if plan and len(plan) == 4 and not is_hopper(device):
        pytest.skip("wgmma needs a Hopper GPU")
    weight = random_weight(n, k, 8, device=device)
    tensors = list(WEIGHT_SCHEMES["w8a8"].prepare(weight, device, torch.float16))
    x = torch.randn(tokens, k, device=device)
    codes, scale, _ = quantize_tokens(x)
    partial_sums = kernel.linear_int8_partial(codes, scale, tensors, "w8a8")
    splits, inputs = (plan[2], 128) if len(plan or ()) == 4 else (plan[3], plan[2]) if plan else (1, k)
    blocks = -(-k // inputs)
    part = -(-blocks // splits) * inputs
    assert partial_sums.shape == (-(-k // part), tokens, n) and partial_sums.dtype == torch.float32
    assert torch.equal(partial_sums, kernel.linear_partial(x, tensors, "w8a8")) and not tensors[2].any()
    for own, left, right in zip(partial_sums, codes.split(part, 1), tensors[0].split(part, 1), strict=True):
        exact = (left.double() @ right.double().T) * scale.double()[:, None] * tensors[1].double()
        assert_rounded_once(own, exact, exact.abs())
    for module in (kernel, ref):
        with pytest.raises(NotImplementedError, match="w4a16 takes no int8 tokens"):
            module.linear_partial(x, [], "w4a16")
    if tokens:
        check_operator("linear_int8_partial", (codes, scale, tensors, "w8a8"))


@pytest.mark.pairs
@pytest.mark.ptx(tokens=[7, 129], dtype=HALF[1:], width=[300])
@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("tokens, plan", [
    (0, (128, 256, 1, 4)), (1, None), (7, (16, 256, 1, 4)), (128, (128, 256, 1, 4)), (129, (128, 256, 1, 4)),
    (300, (64, 256, 1, 3)), (16, (16, 128, 1, 6)), (25, (32, 128, 1, 4)), (300, (128, 128, 1, 4)),
    (300, (128, 256, 2, 4)), (1025, (128, 256, 1, 4)), (129, (64, 128, 1, 3, 1)), (1025, (128, 256, 1, 3, 1)),
])  # fmt: skip
@pytest.mark.parametrize("width", [64, 300])
def test_gate_and_up_in_one_kernel(device, monkeypatch, width, tokens, plan, dtype):
    """Bit for bit the operators one by one, whether the plan holds both halves of a block or not."""
    most = 25 if dtype in HALF else 129  # what fp32 gives is held to the reference too
    if not COMPILED and (tokens > most or (plan is not None and len(plan) == 5)):
        pytest.skip("the interpreter takes the operators one by one")
    k, key = 272, int8_plans.tuning_key(272, 2 * width, int8_plans.width_of(tokens))
    monkeypatch.setattr(choose, "configs", lambda device: {key: named(plan)} if plan else {})
    weight = random_weight(2 * width, k, 8, dtype=dtype, device=device)
    tensors = list(WEIGHT_SCHEMES["w8a8"].prepare(weight, device, dtype))
    bias = torch.randn(2 * width, device=device).to(dtype)
    codes, scale, _ = quantize_tokens(torch.randn(tokens, k, device=device).to(dtype) * 5)
    arguments, act = (codes, scale, tensors, bias, "w8a8", dtype), "silu" if width == 64 else "gelu_tanh"
    got = kernel.linear_act_int8(*arguments, act)
    want = act_mul_int8(kernel.linear_int8(*arguments), act)
    assert got[0].shape == (tokens, width) and got[0].dtype == torch.int8
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    if dtype == torch.float32 and not COMPILED:  # where nothing is rounded between the operators
        near = ref.linear_act_int8(*arguments, act)
        assert (got[0].int() - near[0].int()).abs().le(1).all()
        torch.testing.assert_close(got[1], near[1], rtol=1e-5, atol=0)
    assert tokens == 0 or got[0].abs().amax(1).eq(127).all()
    if tokens:
        check_operator("linear_act_int8", (*arguments, act))


@pytest.mark.parametrize("tokens", [1, 17, 70])
@pytest.mark.parametrize(
    "n, k, dtype",
    [(64, 256, torch.float32), (50, 300, HALF[0]), (1, 33, torch.float32), (130, 1024, HALF[0])],
)
def test_w8a8_is_exact(device, n, k, dtype, tokens):
    """The codes of the reference, an exact integer sum, fp32 products in the reference's order."""
    weight = random_weight(n, k, 8, dtype=dtype, device=device)
    x, bias = torch.randn(tokens, k, device=device).to(dtype) * 3, torch.randn(n, device=device).to(dtype)
    tensors = WEIGHT_SCHEMES["w8a8"].prepare(weight, device, dtype)
    want = WEIGHT_SCHEMES["w8a8"].linear_ref(x, tensors, bias)
    assert relative(kernel.linear(x, tensors, bias, "w8a8"), want.double()) < 2 * UNIT[dtype]
    codes, scale = affine.quantize_tokens(x.cpu())  # on a GPU torch divides by a number inexactly
    sums = codes.long() @ (weight.values.long().cpu() - 128).T
    exact = (sums.double() * scale.double()).to(device) * weight.scale.double().T
    assert_rounded_once(kernel.linear(x, tensors, None, "w8a8"), exact, exact.abs())


@pytest.mark.ptx(dtype=[torch.bfloat16], k=[1])
@pytest.mark.parametrize("k", [1, 700, 768, 4096, 4097, 14336])  # in one block, in three, and in eight
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_token_codes_equal_the_reference(device, dtype, k):
    x = torch.randn(9, k, device=device) * torch.logspace(-6, 4, 9, device=device)[:, None]
    x[3] = 0
    x = x.to(dtype)
    tokens, want = quantize_tokens(x), QuantizedTokens.of(x.cpu())
    assert torch.equal(tokens.codes.cpu(), want.codes) and torch.equal(tokens.scale.cpu(), want.scale)
    assert tokens.dtype == want.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_tokens_at_the_edge_of_two_codes(device, dtype):
    """Quotients within an ulp of a half: a division that is not rounded exactly takes the other code."""
    scale = (torch.rand(64, 1) + 0.5) * 2.0 ** torch.arange(-8, 8).repeat(4)[:, None]
    x = (torch.arange(-126, 127) + 0.5) * scale
    x = torch.cat([127 * scale, x, x * (1 - 2**-23), x * (1 + 2**-23)], 1).to(dtype)
    tokens, want = quantize_tokens(x.to(device)), QuantizedTokens.of(x)
    assert torch.equal(tokens.codes.cpu(), want.codes) and torch.equal(tokens.scale.cpu(), want.scale)


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_int8_tokens_give_the_product_that_x_gives(device, dtype, tokens):
    weight = random_weight(70, 256, 8, dtype=dtype, device=device)
    tensors = list(WEIGHT_SCHEMES["w8a8"].prepare(weight, device, dtype))
    x, bias = torch.randn(tokens, 256, device=device).to(dtype), torch.randn(70, device=device).to(dtype)
    codes, scale, _ = quantize_tokens(x)
    y = kernel.linear_int8(codes, scale, tensors, bias, "w8a8", dtype)
    assert y.dtype == dtype and torch.equal(y, kernel.linear(x, tensors, bias, "w8a8"))
    arguments = (codes, scale, tensors, bias, "w8a8", dtype)
    if tokens:
        check_operator("linear_int8", arguments)
    if not GPU:  # there torch divides inexactly: other codes
        assert torch.equal(ref.linear_int8(*arguments), ref.linear(x, tensors, bias, "w8a8"))
