"""`linear` in Triton (the GPU, or the interpreter) against fp64 on the canonical weight."""

import itertools
import weakref
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from linear_truth import HALF, UNIT, assert_rounded_once, triton_linear
from operators import check_operator
from torch.nn import functional as F
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backends import COMPILED, GPU, PTX, PTX_SM
from qrt.definitions.activations import ACTIVATIONS
from qrt.kernels.act_mul.kernel import act_mul
from qrt.kernels.linear import choose, kernel, linear
from qrt.kernels.linear import device as shared
from qrt.kernels.linear.int8 import plans as int8_plans
from qrt.kernels.linear.int8.quantize_kernel import quantize_tokens
from qrt.kernels.linear.product import Kernel
from qrt.kernels.linear.tiles import dequantize_kernel, wide_kernel
from qrt.kernels.linear.tiles import plans as tile_plans
from qrt.kernels.linear.tiles.device import constants_of
from qrt.kernels.linear.weight import MOST_SIZES, Weight, is_new, ready
from qrt.quant import affine
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.quant.weight.device import unit_of
from qrt.quant.weight.partition import inputs
from qrt.quant.weight.tiles import PLACES, TiledWeight
from random_weights import random_weight, reference, relative

# symmetric or not, in which dtype: all four where it costs nothing
GRIDS = [(True, HALF[1]), (False, HALF[0])] + ([(True, HALF[0]), (False, HALF[1])] if GPU else [])
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(x, weight: WeightData, bias=None):
    """Compare with fp64: Hopper's kernel rounds each weight to the dtype, the others only the result."""
    y, want = triton_linear(x, weight, bias), reference(x, weight, bias)
    assert y.shape == (x.shape[0], weight.out_features) and y.dtype == x.dtype
    scheme = WEIGHT_SCHEMES[f"w{weight.bits}a16"]
    if choose.choose(scheme, x, scheme.prepare(weight, x.device, x.dtype)).kernel is Kernel.WIDE:
        assert relative(y, want) < 2 * UNIT[x.dtype]
    else:
        assert_rounded_once(y, want, x.double().abs() @ weight.dequantize().double().abs().T)


CASES = [  # N, K, group, T: padded rows, ragged last tiles, every run count, every block of tokens
    (64, 256, 128, 1), (70, 384, 128, 2), (130, 768, 256, 3), (1, 96, 32, 7), (65, 160, 32, 17),
    (33, 320, 64, 33), (100, 192, 96, 8), (40, 200, None, 9), (64, 1, None, 4), (64, 512, None, 64),
]  # fmt: skip


@pytest.mark.pairs
@pytest.mark.parametrize("n, k, group, tokens", CASES)
@pytest.mark.parametrize("symmetric, dtype", GRIDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_few_tokens(device, bits, symmetric, dtype, n, k, group, tokens):
    weight = random_weight(n, k, bits, group, symmetric=symmetric, dtype=dtype, device=device)
    x, bias = torch.randn(tokens, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    check(x, weight, bias)


@pytest.fixture
def default_bf16():
    """Torch's default dtype, as scripts around Hugging Face models set it."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_bf16")
@pytest.mark.parametrize("bits", [4, 8])
def test_shares_of_splits_are_fp32_whatever_the_default(device, bits):
    weight = random_weight(64, 4096, bits, 128, dtype=torch.float32, device=device)
    x = torch.randn(2, 4096, dtype=torch.float32, device=device)
    assert relative(triton_linear(x, weight), reference(x, weight)) < 1e-6


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_fp32_is_tight(device, bits, scale_dtype, tokens):
    weight = random_weight(70, 512, bits, 64, symmetric=False, dtype=scale_dtype, device=device)
    x, bias = torch.randn(tokens, 512, device=device), torch.randn(70, device=device)
    assert relative(triton_linear(x, weight, bias), reference(x, weight, bias)) < 1e-6
    assert relative(triton_linear(x, weight), reference(x, weight)) < 1e-6


@pytest.mark.pairs
@pytest.mark.parametrize("symmetric, dtype", GRIDS)
@pytest.mark.parametrize("bits, group", [(4, 128), (4, None), (8, 32)])
@pytest.mark.parametrize("tokens", [65, 129, 300])
def test_many_tokens(device, tokens, bits, group, symmetric, dtype, monkeypatch):
    """The weight is rounded to the dtype: in registers, or in blocks of 64 rows, the last one ragged."""
    monkeypatch.setattr(dequantize_kernel, "SCRATCH_BYTES", 64 * 384 * 2)
    weight = random_weight(150, 384, bits, group, symmetric=symmetric, dtype=dtype, device=device)
    x, bias = torch.randn(tokens, 384, device=device).to(dtype), torch.randn(150, device=device).to(dtype)
    assert relative(triton_linear(x, weight, bias), reference(x, weight, bias)) < 2 * UNIT[dtype]
    assert relative(triton_linear(x, weight), reference(x, weight)) < 2 * UNIT[dtype]


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_permuted_inputs(device, tokens):
    weight = random_weight(70, 384, 4, 128, symmetric=False, perm=True, device=device)
    x = torch.randn(tokens, 384, device=device)
    assert relative(triton_linear(x, weight), reference(x, weight)) < 1e-6


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_part_of_permuted_inputs(device, tokens):
    """A rank's part has padding: more columns than x."""
    part = inputs(random_weight(70, 512, 4, 128, symmetric=False, perm=True), 128, 256)
    assert part.in_features > 128
    weight = replace(
        part, **{name: getattr(part, name).to(device) for name in ("values", "scale", "zero", "perm")}
    )
    x = torch.randn(tokens, 128, device=device)
    assert relative(triton_linear(x, weight), reference(x, weight)) < 1e-6


@pytest.mark.parametrize("zero", [0, 15])
def test_extreme_zero_points(device, zero):
    weight = random_weight(64, 512, 4, 64, device=device)
    weight = WeightData(
        weight.values, weight.scale, torch.full_like(weight.scale, zero).to(torch.uint8), bits=4
    )
    check(torch.randn(3, 512, device=device).half(), weight)


@pytest.mark.parametrize("count", [256, 130, 1025])
@pytest.mark.parametrize("scheme, bits", [("w4a16", 4), ("w8a16", 8), ("w8a8", 8)])
def test_inputs_that_are_not_the_weights_are_refused(device, scheme, bits, count):
    """But for those that fill as many tiles as 600: what is not there of the last one is not kept.

    Of a weight with an order only more are refused, as some of its columns may be padding.
    """
    ordered = scheme == "w8a16" and count > 600
    weight = random_weight(70, 600, bits, None, perm=ordered, dtype=HALF[0], device=device)
    tensors = list(WEIGHT_SCHEMES[scheme].prepare(weight, device, HALF[0]))
    x = torch.randn(3, count, device=device).to(HALF[0])
    for run in linear, kernel.linear:
        with pytest.raises(ValueError, match=rf"x: expected shape \[T K\].*, got \[3, {count}\]"):
            run(x, tensors, None, scheme)


@pytest.mark.parametrize("scheme, bits", [("w4a16", 4), ("w8a16", 8), ("w8a8", 8), ("fp16", 0)])
def test_no_tokens(device, scheme, bits):
    weight = random_weight(70, 64, bits) if bits else WeightData(torch.randn(70, 64))
    assert triton_linear(torch.empty(0, 64, device=device), weight, scheme=scheme).shape == (0, 70)


def test_strided_inputs(device):
    weight = random_weight(64, 256, 4, 128, device=device)
    x = torch.randn(5, 512, device=device)
    for part in (x[:, 256:], x[::2, :256], torch.randn(256, 6, device=device).T):
        assert relative(triton_linear(part, weight), reference(part, weight)) < 1e-6


@pytest.mark.parametrize("bits, k", [(4, 17 * 256), (8, 20 * 128), (8, 17 * 128)])
def test_split_sums_repeat_bit_for_bit(device, bits, k):
    """More tiles than splits: shares of two, where 17 leave the last one short and 20 need fewer splits."""
    weight = random_weight(64, k, bits, 128, symmetric=False, device=device)
    tensors = WEIGHT_SCHEMES[f"w{bits}a16"].prepare(weight, device, torch.float16)
    assert tile_plans.fused_plan(8, *TiledWeight(*tensors).packed.shape[:2]).splits in (9, 10)
    x = torch.randn(3, k, device=device).half()
    first = kernel.linear(x, tensors, None, f"w{bits}a16")
    assert relative(first, reference(x, weight)) < UNIT[x.dtype]
    for _ in range(20 if GPU else 1):
        assert torch.equal(kernel.linear(x, tensors, None, f"w{bits}a16"), first)
    assert not TiledWeight(*tensors).arrivals.any()


MEASURED = [  # T and what the launchers would find measured, of every kernel; never whole blocks
    (5, ("fused", 1, 3, 2, 4)), (19, ("fused", 2, 2, 4, 3)),
    (67, ("wide", 64, 2, 3, 2, 3, 3)), (77, ("wide", 128, 1, 2, 1, 3, 3)),
    (257, ("wide", 256, 2, 1, 1, 4, 3)), (70, ("wide", 64, 2, 1, 2, 3, 3, 2)),
    (131, ("wide", 128, 1, 2, 2, 2, 4)), (71, ("dequantize",)),
]  # fmt: skip


@pytest.mark.parametrize("tokens, plan", MEASURED)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_kind_of_measured_plan(device, monkeypatch, bits, tokens, plan):
    n, k, dtype = 70, 672, HALF[0]
    width = tile_plans.width_of(tokens)
    monkeypatch.setattr(choose, "configs", lambda device: {tile_plans.tuning_key(k, n, bits, width): plan})
    weight = random_weight(n, k, bits, 32, symmetric=False, dtype=dtype, device=device)
    x, bias = torch.randn(tokens, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    assert relative(triton_linear(x, weight, bias), reference(x, weight, bias)) < 2 * UNIT[dtype]


GATED = [(4, False, HALF[0]), (4, True, HALF[1]), (8, False, HALF[0])]


@pytest.mark.pairs
@pytest.mark.parametrize("bits, symmetric, dtype", GATED)
@pytest.mark.parametrize("width, tokens, plan", [
    (64, 1, (2, 1, 4, 3)), (192, 8, (2, 1, 2, 3)), (128, 16, (2, 1, 4, 3)), (64, 30, (2, 1, 4, 3)),
    (100, 9, (2, 1, 4, 3)), (64, 5, (1, 1, 2, 3)), (64, 5, (2, 2, 4, 3)), (64, 70, None), (64, 0, None),
])  # fmt: skip
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gate_and_up_in_one_kernel(device, monkeypatch, act, width, tokens, plan, bits, symmetric, dtype):
    """Bit for bit the operators one by one, whether a program holds both halves of its columns or not."""
    k, scheme, key = (
        320,
        f"w{bits}a16",
        tile_plans.tuning_key(320, 2 * width, bits, tile_plans.width_of(tokens)),
    )
    monkeypatch.setattr(choose, "configs", lambda device: {key: ("fused", *plan)} if plan else {})
    weight = random_weight(2 * width, k, bits, 32, symmetric=symmetric, dtype=dtype, device=device)
    tensors = list(WEIGHT_SCHEMES[scheme].prepare(weight, device, dtype))
    x, bias = torch.randn(tokens, k, device=device).to(dtype), torch.randn(2 * width, device=device).to(dtype)
    for given in (None, bias):
        got = kernel.linear_act(x, tensors, given, scheme, act)
        want = act_mul(kernel.linear(x, tensors, given, scheme), act)
        assert got.shape == (tokens, width) and got.dtype == dtype
        if GPU:
            assert torch.equal(got, want)
        else:  # the interpreter's sums depend on where a row stands in its block
            torch.testing.assert_close(got, want, rtol=4 * UNIT[dtype], atol=2**-20)
    if tokens:
        check_operator("linear_act", (x, tensors, bias, scheme, act))
        exact = reference(x, weight, bias).unflatten(1, (2, -1))
        definition = ACTIVATIONS[act](exact[:, 0]) * exact[:, 1]
        assert relative(got, definition) < 8 * UNIT[dtype]


@pytest.mark.gpu
@pytest.mark.ptx(bits=[4], symmetric=[False], tokens=[40, 20, 130, 67], act=["silu"])
@pytest.mark.ptx(bits=[4], symmetric=[False], tokens=[67], act=["gelu", "gelu_tanh"])
@pytest.mark.usefixtures("copies", "small_gpu")
@pytest.mark.parametrize("bits, symmetric, dtype", GATED)
@pytest.mark.parametrize("width, tokens, plan", [
    (64, 40, (64, 2, 1, 2, 2, 2, 2)), (128, 70, (64, 2, 1, 1, 3, 2, 2)), (64, 90, (128, 2, 1, 2, 1, 3, 2)),
    (64, 20, (32, 2, 1, 2, 2, 2, 2)), (64, 20, (16, 2, 1, 2, 2, 2, 2)), (128, 130, (128, 2, 1, 1, 3, 2, 1)),
    (64, 20, (32, 2, 1, 2, 2, 2, 1)), (64, 40, (64, 1, 1, 2, 2, 2)), (192, 40, (64, 4, 1, 2, 2, 2, 4)),
    (192, 67, (64, 2, 1, 2, 3, 2, 1, 1)), (192, 67, (64, 2, 1, 2, 2, 2, 2, 1)),
])  # fmt: skip
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_gate_and_up_by_groups(device, monkeypatch, act, width, tokens, plan, bits, symmetric, dtype):
    """Bit for bit the operators one by one."""
    product = choose.Product(choose.Kernel.WIDE, "", tile_plans.WidePlan(*plan))
    monkeypatch.setattr(choose, "tile_plan", lambda *weight: product)
    scheme, weight = f"w{bits}a16", random_weight(2 * width, 384, bits, 128, symmetric=symmetric, dtype=dtype)
    tensors = WEIGHT_SCHEMES[scheme].prepare(weight, device, dtype)
    x, bias = (
        torch.randn(tokens, 384, device=device).to(dtype),
        torch.randn(2 * width, device=device).to(dtype),
    )
    for given in (bias,) if PTX else (None, bias):
        want = act_mul(kernel.linear(x, tensors, given, scheme), act)
        with monkeypatch.context() as patch:
            patch.delattr(kernel, "act_mul")
            assert torch.equal(kernel.linear_act(x, tensors, given, scheme, act), want)


@pytest.mark.parametrize("scheme", ["fp16", "w8a8"])
def test_gate_and_up_of_other_schemes(device, scheme):
    weight = WeightData(torch.randn(96, 64)) if scheme == "fp16" else random_weight(96, 64, 8, device=device)
    tensors = list(WEIGHT_SCHEMES[scheme].prepare(weight, device, torch.float32))
    x = torch.randn(3, 64, device=device)
    want = act_mul(kernel.linear(x, tensors, None, scheme), "gelu")
    assert want.shape == (3, 48)
    assert torch.equal(kernel.linear_act(x, tensors, None, scheme, "gelu"), want)


@pytest.mark.ptx
@pytest.mark.parametrize("scheme, bits", [("w4a16", 4), ("w8a16", 8), ("w8a8", 8), ("w4a8", 4), ("fp16", 0)])
def test_products_that_a_weight_keeps(device, scheme, bits):
    """The same bits, whatever x comes between; where Gluon's kernels run, those of many tokens are kept."""
    if scheme == "w4a8" and not COMPILED:
        pytest.skip("none of its products is kept there")
    dtype = HALF[1] if COMPILED else torch.float32
    own = WeightData(torch.randn(128, 256).to(dtype)) if scheme == "fp16" else random_weight(
        128, 256, bits, None, dtype=dtype, device=device, progressive=scheme == "w4a8"
    )  # fmt: skip
    tensors = list(WEIGHT_SCHEMES[scheme].prepare(own, device, dtype))
    weight, bias = Weight(tensors), torch.randn(128, device=device).to(dtype)
    many = 130 if scheme == "w8a8" else 40  # so that its kernel of many tokens runs
    many = many if COMPILED else 4
    inputs = [torch.randn(tokens, 256, device=device).to(dtype) for tokens in (many, 3, many, 0)]
    calls = (0, None, "silu"), (2, bias, "relu"), (1, bias, "silu"), (3, None, "relu"), (0, bias, "silu")
    if GPU:
        calls = itertools.product((0, 1, 2, 3, 0), (None, bias), ("silu", "relu"))
    for number, given, act in calls:
        x, args = inputs[number], (given, scheme)
        assert torch.equal(kernel.linear(x, weight, *args), kernel.linear(x, tensors, *args))
        assert torch.equal(*(kernel.linear_act(x, which, *args, act) for which in (weight, tensors)))
        if scheme in ("w8a8", "w4a8"):
            tokens = quantize_tokens(x)[:2]
            for multiply, act in ((kernel.linear_int8, ()), (kernel.linear_act_int8, ("silu",))):
                got, want = (multiply(*tokens, which, *args, dtype, *act) for which in (weight, tensors))
                assert all(map(torch.equal, got, want))
    kept = {key[0] for key, product in weight.ready.items() if product}
    own_kernels = device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9 or PTX and PTX_SM == 90
    names = {"w8a8": {"linear", "int8", "act int8"}, "w4a8": {"linear", "int8"}, "fp16": set()}
    names = names.get(scheme, {"linear", "act"})
    assert kept == (names if own_kernels else set())


def test_a_weight_keeps_products_of_some_sizes():
    weight = Weight([torch.zeros(1)])
    for size in range(3 * MOST_SIZES):
        assert is_new(weight, size) and ready(weight, size) is None
        weight.keep(size, torch.neg)
        assert not is_new(weight, size) and ready(weight, size) is torch.neg
    assert 0 < len(weight.ready) <= MOST_SIZES
    assert not is_new([torch.zeros(1)], 0) and ready([torch.zeros(1)], 0) is None


def test_descriptors_of_weights_are_made_once_and_keep_no_memory():
    layout = shared.SWIZZLED[2, 64]
    weight = torch.zeros(4, 3, 64, 64, dtype=torch.int16)
    place = (4, 192, 64), torch.int16, (2, 64, 64), layout
    made = shared.of_weight(weight, *place)
    want = TensorDescriptor.from_tensor(weight.view(4, 192, 64), [2, 64, 64], layout)
    assert made is shared.of_weight(weight, *place)
    own = made.for_triton
    assert (own.base.data_ptr(), own.base.dtype) == (want.base.data_ptr(), want.base.dtype)
    assert (own.shape, own.strides) == (list(want.shape), list(want.strides))
    assert (own.block_shape, own.layout, own.padding) == (want.block_shape, want.layout, want.padding)
    gone = weakref.ref(weight)
    del weight, want
    assert gone() is None


@pytest.mark.gpu
@pytest.mark.ptx(
    bits=[4], tokens=[65, 41, 50, 150, 12, 7], symmetric=[False], dtype=HALF[1:], scales=HALF[1:]
)
@pytest.mark.ptx(bits=[8], tokens=[41, 150], symmetric=[False], dtype=HALF[1:], scales=HALF[1:])
@pytest.mark.ptx(tokens=[65], symmetric=[True], dtype=HALF[1:], scales=HALF[1:])
@pytest.mark.usefixtures("copies", "small_gpu")
@pytest.mark.parametrize("n, k, group, tokens, plan", [
    (200, 960, None, 33, (64, 1, 3, 2, 3, 3)), (130, 960, 32, 65, (64, 2, 2, 2, 2, 3)),
    (70, 1152, 64, 200, (128, 2, 1, 1, 3, 3)), (64, 768, 256, 513, (256, 1, 2, 1, 4, 3)),
    (190, 960, 32, 41, (64, 2, 2, 2, 2, 3, 2)), (200, 1152, 128, 50, (64, 4, 1, 2, 3, 3, 4)),
    (330, 768, 256, 300, (256, 2, 1, 1, 4, 3, 2)), (300, 960, None, 90, (64, 4, 2, 2, 3, 2, 2)),
    (140, 1152, 128, 60, (64, 2, 1, 2, 1, 2, 2)), (130, 1152, 128, 50, (64, 1, 1, 2, 2, 2, 2)),
    (64, 768, 256, 150, (128, 1, 3, 1, 2, 1, 2)), (70, 1280, 128, 12, (16, 1, 2, 2, 4, 2, 2)),
    (70, 1280, 128, 7, (8, 1, 1, 2, 2, 2, 2)), (300, 960, None, 150, (64, 2, 1, 2, 3, 2, 1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("scales", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("bits, symmetric", [(4, True), (4, False), (8, True), (8, False)])
def test_wide_kernel(device, bits, symmetric, dtype, scales, n, k, group, tokens, plan):
    """Ragged in every direction, every layout of tiles and scales, and twice the same bits."""
    weight = random_weight(n, k, bits, group, symmetric=symmetric, dtype=scales, device=device)
    tiled = TiledWeight(*WEIGHT_SCHEMES[f"w{bits}a16"].prepare(weight, device, dtype))
    x, bias = torch.randn(tokens, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    constants = constants_of(tiled, bits, WEIGHT_SCHEMES[f"w{bits}a16"].unpacker())
    first, again = torch.empty(2, tokens, n, device=device, dtype=dtype)
    multiply = wide_kernel.wide_product(x, tiled, bias, constants, tile_plans.WidePlan(*plan), False)
    multiply(x, bias, first)
    assert relative(first, reference(x, weight, bias)) < 2 * UNIT[dtype]
    for _ in range(3 if GPU else 1):
        multiply(x, bias, again)
        assert torch.equal(again, first)
    assert not tiled.arrivals.any()


@pytest.mark.parametrize("tokens", [7, 65, 257])
@pytest.mark.parametrize("dtype", HALF if COMPILED else HALF[:1])
@pytest.mark.parametrize("scheme, bits, group", [("w4a16", 4, 128), ("w8a16", 8, 128), ("w8a8", 8, None)])
def test_no_worse_than_torch_in_16_bits(device, scheme, bits, group, dtype, tokens):
    """torch multiplies operands dequantized to the dtype; ours may lose a tenth more."""
    weight = random_weight(130, 512, bits, group, dtype=dtype, device=device)
    x = seen = torch.randn(tokens, 512, device=device).to(dtype)
    if scheme == "w8a8":  # its tokens are codes times scales
        codes, scale = affine.quantize_tokens(x.cpu())
        seen = (codes * scale.double()).to(device)
    want = reference(seen, weight)
    theirs = F.linear(seen.to(dtype), weight.dequantize().to(dtype))
    ours = triton_linear(x, weight, scheme=scheme)
    assert relative(ours, want) <= 1.1 * relative(theirs, want)


@pytest.mark.gpu
@pytest.mark.ptx(tokens=[20, 70], power=[-70, 40], bits=[8])
@pytest.mark.parametrize("tokens", [3, 20, 70])
@pytest.mark.parametrize("power", [-70, 17, 40])
@pytest.mark.parametrize("bits, symmetric", [(4, True), (4, False), (8, True), (8, False)])
def test_scales_of_any_size(device, bits, symmetric, power, tokens):
    """Also those that codes in units of bf16's smallest numbers cannot be multiplied by."""
    weight = random_weight(64, 256, bits, 128, symmetric=symmetric, dtype=torch.bfloat16, device=device)
    weight = replace(weight, scale=weight.scale * 2.0**power)
    x = torch.randn(tokens, 256, device=device).bfloat16()
    assert relative(triton_linear(x, weight), reference(x, weight)) < 2 * UNIT[torch.bfloat16]


@triton.jit
def _unpack(
    W, ZEROS, OUT, PLANES: tl.constexpr, UNPACK: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    rows = tl.arange(0, 64)
    i = rows[:, None] * 64 + tl.arange(0, 64)[None, :] + tl.program_id(0) * 4096
    words = tl.load(W + i)
    zero = 0
    if ZEROS is not None:
        zero = tl.load(ZEROS + tl.program_id(0) * 64 + rows)[:, None]
    for p in tl.static_range(PLANES):
        tl.store(OUT + p * 65536 + i, UNPACK(words, zero, p, DTYPE, ASM).to(tl.float32) * unit_of(DTYPE, ASM))


@pytest.mark.ptx(dtype=[tl.float16, tl.bfloat16])
@pytest.mark.parametrize("dtype", [tl.float32, tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_word_unpacks_exactly(device, bits, symmetric, dtype):
    """Rows of 64 words have zero points of their own, all there are."""
    words = torch.arange(-32768, 32768, dtype=torch.int32, device=device)
    zeros = (torch.arange(1024, dtype=torch.int32, device=device) * 37) % 2**bits - 2 ** (bits - 1)
    out = torch.empty(16 // bits, 65536, device=device)
    unpacker = WEIGHT_SCHEMES[f"w{bits}a16"].unpacker()
    given = None if symmetric else zeros
    _unpack[(16,)](words.to(torch.int16), given, out, 16 // bits, unpacker, COMPILED, dtype)
    less = 0 if symmetric else zeros.repeat_interleave(64)
    for place, plane in zip(PLACES[bits], out, strict=True):
        assert torch.equal(plane, ((words >> place) % 2**bits - 2 ** (bits - 1) - less).float())


@pytest.mark.parametrize("scheme, bits", [("w4a16", 4), ("w8a16", 8), ("w8a8", 8), ("fp16", 0)])
def test_operator(device, scheme, bits):
    """Schema, fake and reference agree; `linear` is what the layers call."""
    weight = random_weight(70, 64, bits, device=device) if bits else WeightData(torch.randn(70, 64))
    tensors = list(WEIGHT_SCHEMES[scheme].prepare(weight, device, torch.float32))
    x, bias = torch.randn(3, 64, device=device), torch.randn(70, device=device)
    check_operator("linear", (x, tensors, bias, scheme))
    want = WEIGHT_SCHEMES[scheme].linear_ref(x, tensors, bias)
    assert relative(linear(x, tensors, bias, scheme), want.double()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_replays_in_a_cuda_graph(device, bits):
    weight = random_weight(4096, 4096, bits, 128, symmetric=False, dtype=torch.bfloat16, device=device)
    tensors = WEIGHT_SCHEMES[f"w{bits}a16"].prepare(weight, device, torch.bfloat16)
    x = torch.randn(4, 4096, device=device).bfloat16()
    want = kernel.linear(x, tensors, None, f"w{bits}a16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.linear(x, tensors, None, f"w{bits}a16")
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, want)


@pytest.mark.ptx
@pytest.mark.parametrize("scheme, plan", [
    ("w4a16", ("wide", 64, 1, 2, 2, 4, 4)), ("w8a8", ("block", 64, 64, 256, 2, 4, 4)),
    ("w8a8", ("hopper", 64, 64, 2, 8)),
])  # fmt: skip
def test_blocks_that_have_no_counter_are_not_split(device, monkeypatch, scheme, plan):
    """Of fewer rows than there are blocks of tokens, whose counters would be other memory."""
    if not COMPILED and plan[0] != "block":
        pytest.skip("Hopper's kernels")
    n, k, tokens = 1, 2048, 100
    table = {tile_plans.tuning_key(k, n, 4, 128): [*plan], int8_plans.tuning_key(k, n, 128): [*plan]}
    monkeypatch.setattr(choose, "configs", lambda device: table)
    weight = random_weight(n, k, 4 if scheme == "w4a16" else 8, dtype=HALF[1], device=device)
    *tensors, _ = WEIGHT_SCHEMES[scheme].prepare(weight, device, HALF[1])
    memory = torch.tensor([0, 5, 5], dtype=torch.int32, device=device)
    x = torch.randn(tokens, k, device=device).to(HALF[1])
    y = kernel.linear(x, [*tensors, memory[:n]], None, scheme)
    assert relative(y, reference(x, weight)) < 0.02 and memory.tolist() == [0, 5, 5]
