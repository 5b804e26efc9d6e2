"""Run-time layouts and torch references of the weight schemes against fp64 on the canonical weight."""

import pytest
import torch

from qrt.errors import UnsupportedError
from qrt.quant import affine
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData, product
from qrt.quant.weight.base import fuse
from qrt.quant.weight.tiles import TiledWeight
from qrt.quant.weight.w4a16 import packed as int4
from qrt.quant.weight.w8a8.scheme import integer_product
from qrt.quant.weight.w8a16 import packed as int8
from random_weights import random_weight, reference, relative

CPU = torch.device("cpu")
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one rounding


def run(scheme: str, x, weight: WeightData, bias=None):
    tensors = WEIGHT_SCHEMES[scheme].prepare(weight, CPU, x.dtype)
    assert WEIGHT_SCHEMES[scheme].out_features(tensors) == weight.out_features
    return WEIGHT_SCHEMES[scheme].linear_ref(x, tensors, bias)


SHAPES = [  # N, K, group: one tile, padded rows, ragged last tile, every run count, one group a row
    (64, 256, 128), (1, 384, 128), (70, 96, 32), (130, 160, 32), (65, 320, 64), (33, 768, 256),
    (40, 192, 96), (64, 64, None), (17, 200, None), (9, 1, None),
]  # fmt: skip


@pytest.mark.parametrize("n, k, group", SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_hold_the_weight_exactly(bits, symmetric, n, k, group):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = random_weight(n, k, bits, group, symmetric=symmetric, dtype=dtype)
        tensors = WEIGHT_SCHEMES[f"w{bits}a16"].prepare(weight, CPU, torch.bfloat16)
        assert torch.equal(TiledWeight(*tensors).dequantize(bits, k), weight.dequantize())


PLACES = {4: (0, 8, 4, 12), 8: (0, 8)}  # of a word's planes, by the docstring


@pytest.mark.parametrize("bits, group, words", [(4, 128, 64), (4, 32, 32), (8, 128, 64), (8, 32, 32)])
def test_tiles_are_laid_out_as_documented(bits, group, words):
    planes = 16 // bits
    weight = random_weight(128, 4 * planes * words, bits, group, symmetric=False)
    packed, scale, zero, perm, arrivals, *absent = WEIGHT_SCHEMES[f"w{bits}a16"].prepare(
        weight, CPU, torch.float32
    )
    assert packed.shape == (2, 4, 64, words) and packed.dtype == torch.int16 and packed.is_contiguous()
    assert not any(map(len, (perm, *absent))) and arrivals.tolist() == [0] * 128
    runs = scale.shape[2] * scale.shape[4]
    for block, tile, row, j in ((0, 0, 0, 0), (1, 3, 63, words - 1), (1, 0, 5, 17), (0, 2, 40, 3)):
        word = packed[block, tile, row, j].item() & 0xFFFF
        for p in range(planes):
            k = tile * planes * words + p * words + j
            assert word >> PLACES[bits][p] & (2**bits - 1) == weight.values[64 * block + row, k]
            run, group_of_k = p * runs // planes, k // group
            lane = scale[block, tile, run // scale.shape[4], row, run % scale.shape[4]]
            assert lane == weight.scale[64 * block + row, group_of_k]
            offset = zero[block, tile, row, run].item() + 2 ** (bits - 1)
            assert offset == weight.zero[64 * block + row, group_of_k]


@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only_linear(bits, symmetric, tokens):
    weight = random_weight(70, 384, bits, 128, symmetric=symmetric, perm=True)
    x, bias = torch.randn(tokens, 384), torch.randn(70)
    y = run(f"w{bits}a16", x, weight, bias)
    assert y.shape == (tokens, 70) and y.dtype == torch.float32
    if tokens:
        assert relative(y, reference(x, weight, bias)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme, bits", [("w4a16", 4), ("w8a16", 8)])
def test_half_precision_is_one_rounding(scheme, bits, dtype):
    weight = random_weight(70, 384, bits, 64, symmetric=False, dtype=dtype)
    x, bias = torch.randn(9, 384).to(dtype), torch.randn(70).to(dtype)
    want = reference(x, weight, bias)
    error = (run(scheme, x, weight, bias).double() - want).abs()
    assert (error <= UNIT[dtype] * want.abs() + 1e-5).all()


def test_permutation_is_undone():
    """Column j of the codes multiplies input perm[j]: one-hot inputs pick columns."""
    weight = random_weight(5, 64, 4, 32, perm=True)
    y = run("w4a16", torch.eye(64), weight)
    centered = affine.dequantize(weight.values, weight.scale, None, 4)
    for j in (0, 1, 31, 63):
        assert torch.equal(y[weight.perm[j]], centered[:, j])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", ["lowest", "highest"])
def test_extreme_zero_points(bits, zero):
    weight = random_weight(64, 256, bits, 64)
    at = 0 if zero == "lowest" else 2**bits - 1
    weight = WeightData(
        weight.values, weight.scale, torch.full_like(weight.scale, at).to(torch.uint8), bits=bits
    )
    x = torch.randn(4, 256)
    assert relative(run(f"w{bits}a16", x, weight), reference(x, weight)) < 1e-6


def test_w8a8_is_the_integer_product():
    weight = random_weight(40, 3000, 8, dtype=torch.bfloat16)  # more inputs than one exact fp32 sum
    x, bias = torch.randn(6, 3000).bfloat16() * 3, torch.randn(40).bfloat16()
    x[2] = 0
    codes, scale = affine.quantize_tokens(x)
    total = codes.long() @ (weight.values.long() - 128).T
    want = (total.double() * scale.double() * weight.scale.double().T + bias.double()).float()
    error = (run("w8a8", x, weight, bias).double() - want).abs()
    assert (error <= UNIT[torch.bfloat16] * want.abs() + 1e-6).all()
    assert relative(run("w8a8", x.float(), weight, bias.float()), want.double()) < 1e-6
    assert run("w8a8", x[:0], weight, bias).shape == (0, 40)


def test_w8a8_sums_are_exact_at_the_extremes():
    values = torch.zeros(2, 28672, dtype=torch.uint8)  # code 0 stands for -128
    weight = WeightData(values, torch.ones(2, 1), bits=8)
    y = run("w8a8", torch.full((1, 28672), -127.0), weight)
    assert y.tolist() == [[127.0 * 128 * 28672] * 2]


def test_w8a8_is_close_to_the_unquantized_product():
    weight = random_weight(64, 512, 8)
    x = torch.randn(8, 512)
    assert relative(run("w8a8", x, weight), reference(x, weight)) < 0.01


def test_w8a8_undoes_a_permutation():
    weight = random_weight(5, 64, 8, perm=True)
    x = torch.randn(3, 64)
    plain = WeightData(weight.values[:, torch.argsort(weight.perm)], weight.scale, bits=8)
    assert torch.equal(run("w8a8", x, weight), run("w8a8", x, plain))


@pytest.mark.parametrize("vnni", [False, True])
def test_integer_products_agree_with_and_without_vnni(vnni, monkeypatch):
    if vnni and not torch.cpu._is_vnni_supported():
        pytest.skip("this CPU has no VNNI")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    for tokens, n, k in ((1, 64, 2048), (3, 7, 33), (70, 130, 1500), (2, 1, 1), (2, 9, 1), (0, 5, 64)):
        a, b = (torch.randint(-128, 128, (rows, k)).to(torch.int8) for rows in (tokens, n))
        assert torch.equal(integer_product(a, b), (a.long() @ b.long().T).int())
        a, b = a.fill_(-128), b.fill_(-128)
        assert (integer_product(a, b) == 128 * 128 * k).all()


# torch's layouts on a CPU: N, K, group
PACKED4 = [(64, 256, 128), (128, 96, 32), (192, 320, 64), (64, 768, 256), (64, 192, 96), (128, 1024, 512),
           (64, 512, None)]  # fmt: skip
PACKED8 = [(64, 256, 128), (70, 96, 32), (1, 192, 96), (33, 768, 256), (65, 512, None)]
needs_int4 = pytest.mark.skipif(not int4.block_rows(), reason="torch packs int4 in another way here")


def run_packed(scheme: str, x, weight: WeightData, bias=None):
    tensors = WEIGHT_SCHEMES[scheme].prepare_cpu(weight, x.dtype)
    assert len(tensors) == 3 and WEIGHT_SCHEMES[scheme].out_features(tensors) == weight.out_features
    return WEIGHT_SCHEMES[scheme].linear_cpu(x, tensors, bias)


@needs_int4
@pytest.mark.parametrize("tokens", [0, 1, 5, int4.FEW_TOKENS + 1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("n, k, group", PACKED4)
def test_packed_int4_is_as_near_as_stated(n, k, group, symmetric, tokens, monkeypatch):
    """One rounding of y; asymmetric, of each group's (8 - zero) * scale; many tokens, of the weight."""
    monkeypatch.setattr(int4, "SCRATCH_BYTES", 2 * 64 * k)  # one block of outputs at a time
    weight = random_weight(n, k, 4, group, symmetric=symmetric, dtype=torch.bfloat16, perm=True)
    x = torch.randn(tokens, k).bfloat16()
    y, want = run_packed("w4a16", x, weight), reference(x, weight)
    assert y.shape == (tokens, n) and y.dtype == torch.bfloat16
    unit = UNIT[torch.bfloat16]
    magnitude = x.double().abs() @ weight.dequantize().double().abs().T
    slack = unit * want.abs() + 1e-5 * magnitude
    if tokens > int4.FEW_TOKENS:
        slack += unit * magnitude
    elif not symmetric:
        sums = x[:, weight.perm].double().unflatten(1, (weight.scale.shape[1], -1)).sum(-1).abs()
        slack += unit * sums @ ((8 - weight.zero.double()) * weight.scale.double()).abs().T
    assert ((y.double() - want).abs() <= slack).all()


@needs_int4
@pytest.mark.parametrize("n, k, group", PACKED4)
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_int4_dequantizes_with_one_rounding(n, k, group, symmetric, monkeypatch):
    monkeypatch.setattr(int4, "PACKED_ROWS", 64)
    weight = random_weight(n, k, 4, group, symmetric=symmetric, dtype=torch.bfloat16)
    weight.scale[0, 0] = 0
    packed = int4.PackedInt4.pack(weight, torch.bfloat16)
    assert torch.equal(packed.dequantize(slice(0, n)).T, weight.dequantize().bfloat16())
    assert torch.equal(packed.dequantize(slice(n - 64, n)).T, weight.dequantize()[-64:].bfloat16())


@pytest.mark.parametrize("tokens", [0, 1, 6, int8.FEW_TOKENS + 1])
@pytest.mark.parametrize("n, k, group", PACKED8)
def test_packed_int8_is_as_near_as_stated(n, k, group, tokens):
    """One rounding of y and one of each group's sum; many tokens, of the weight instead."""
    weight = random_weight(n, k, 8, group, dtype=torch.bfloat16, perm=True)
    x, bias = torch.randn(tokens, k + 1).bfloat16()[:, 1:], torch.randn(n).bfloat16()  # x is not aligned
    y, want = run_packed("w8a16", x, weight, bias), reference(x, weight, bias)
    assert y.shape == (tokens, n) and y.dtype == torch.bfloat16
    unit, groups = UNIT[torch.bfloat16], weight.scale.shape[1]
    columns = weight.dequantize().double()[:, weight.perm].unflatten(1, (groups, -1))
    parts = torch.einsum("tgk,ngk->tng", x[:, weight.perm].double().unflatten(1, (groups, -1)), columns)
    magnitude = x.double().abs() @ weight.dequantize().double().abs().T
    inner = magnitude if tokens > int8.FEW_TOKENS else parts.abs().sum(-1)
    assert ((y.double() - want).abs() <= unit * (want.abs() + inner) + 1e-5 * magnitude).all()


@needs_int4
def test_packed_int4_adds_a_bias():
    weight = random_weight(64, 256, 4, 128, dtype=torch.bfloat16)
    x, bias = torch.randn(3, 256).bfloat16(), torch.randn(64).bfloat16()
    assert torch.equal(run_packed("w4a16", x, weight, bias), run_packed("w4a16", x, weight) + bias)


@pytest.mark.parametrize(
    "weight, dtype",
    [
        (random_weight(64, 256, 4, 128), torch.float32), (random_weight(64, 256, 4, 128), torch.float16),
        (random_weight(70, 256, 4, 128), torch.bfloat16), (random_weight(64, 200, 4), torch.bfloat16),
        (random_weight(64, 256, 8, 128), torch.float32), (random_weight(64, 200, 8), torch.bfloat16),
        (random_weight(64, 256, 8, 128, symmetric=False), torch.bfloat16),
    ],
)  # fmt: skip
def test_weights_torch_cannot_pack_run_in_the_reference(weight, dtype):
    scheme = WEIGHT_SCHEMES[f"w{weight.bits}a16"]
    tensors, tiles = scheme.prepare_cpu(weight, dtype), scheme.prepare(weight, CPU, dtype)
    assert len(tensors) == len(tiles) and all(map(torch.equal, tensors, tiles))
    x = torch.randn(3, weight.in_features).to(dtype)
    assert torch.equal(scheme.linear_cpu(x, tensors, None), scheme.linear_ref(x, tiles, None))


def test_another_packing_runs_in_the_reference(monkeypatch):
    monkeypatch.setattr(int4, "block_rows", lambda: 0)
    weight = random_weight(64, 256, 4, 128)
    assert len(WEIGHT_SCHEMES["w4a16"].prepare_cpu(weight, torch.bfloat16)) == len(TiledWeight._fields)


def test_fp16_is_torch():
    values, bias = torch.randn(5, 7), torch.randn(5)
    x = torch.randn(3, 7)
    assert torch.equal(run("fp16", x, WeightData(values), bias), x @ values.T + bias)
    (tensor,) = WEIGHT_SCHEMES["fp16"].prepare(WeightData(values), CPU, torch.bfloat16)
    assert torch.equal(tensor, values.bfloat16())


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, product.FEW_TOKENS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp16_on_a_cpu_rounds_once(dtype, tokens, slow, monkeypatch):
    monkeypatch.setattr(product, "SLOW_IN_16_BITS", slow)
    monkeypatch.setattr(product, "SCRATCH_BYTES", 4 * 200 * 16)  # 16 outputs at a time
    x, values, bias = (
        torch.randn(tokens, 200).to(dtype),
        torch.randn(70, 200).to(dtype),
        torch.randn(70).to(dtype),
    )
    for given in (None, bias):
        y = WEIGHT_SCHEMES["fp16"].linear_cpu(x, (values,), given)
        want = reference(x, WeightData(values), given)
        assert y.shape == (tokens, 70) and y.dtype == dtype
        assert ((y.double() - want).abs() <= UNIT[dtype] * want.abs() + 1e-4).all()


@pytest.mark.parametrize(
    "scheme, weight, message",
    [
        (
            "w4a16",
            random_weight(4, 64, 4, 16),
            r"w4a16: expected 4-bit codes.*, got 4-bit codes in groups of 16;",
        ),
        ("w4a16", random_weight(4, 96, 4, 48), r"groups of a multiple of 32 .*got .*groups of 48"),
        (
            "w8a16",
            random_weight(4, 64, 4, 32),
            r"w8a16: expected 8-bit codes.*, got 4-bit codes in groups of 32",
        ),
        ("w4a16", random_weight(4, 64, 3, 32), r"got 3-bit"),
        ("w4a16", WeightData(torch.zeros(4, 64)), r"got 0-bit"),
        (
            "w8a8",
            random_weight(4, 64, 8, 32),
            r"w8a8: expected .*, got symmetric 8-bit codes with 2 scales a row",
        ),
        ("w8a8", random_weight(4, 64, 8, symmetric=False), r"got asymmetric 8-bit"),
        ("w8a8", random_weight(4, 64, 4), r"got symmetric 4-bit"),
        ("fp16", random_weight(4, 64, 8), r"fp16: expected unquantized weights, got 8-bit"),
    ],
)
def test_grids_that_do_not_run_are_refused_by_name(scheme, weight, message):
    with pytest.raises(UnsupportedError, match=message) as error:
        WEIGHT_SCHEMES[scheme].prepare(weight, CPU, torch.float32)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "scheme, bits, symmetric", [("w4a16", 4, False), ("w8a16", 8, True), ("w8a8", 8, True)]
)
def test_fused_parts_multiply_as_one(scheme, bits, symmetric):
    group = None if scheme == "w8a8" else 32
    parts = [random_weight(n, 96, bits, group, symmetric=symmetric, seed=n) for n in (32, 16, 17)]
    x = torch.randn(3, 96)
    apart = torch.cat([run(scheme, x, part) for part in parts], 1)
    assert relative(run(scheme, x, fuse(parts)), apart.double()) < 1e-6


def test_fuse_stacks_everything():
    q, k = random_weight(8, 64, 4, 32, symmetric=False), random_weight(4, 64, 4, 32, symmetric=False, seed=1)
    k = WeightData(k.values, k.scale, k.zero, bias=torch.ones(4, dtype=torch.bfloat16), bits=4)
    both = fuse([q, k])
    assert torch.equal(both.dequantize(), torch.cat([q.dequantize(), k.dequantize()]))
    assert both.bias.tolist() == [0.0] * 8 + [1.0] * 4 and both.bias.dtype == torch.bfloat16
    assert fuse([q]).bias is None and fuse([q]).bits == 4
    plain = fuse([WeightData(torch.ones(2, 3)), WeightData(torch.zeros(1, 3))])
    assert plain.values.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] and plain.scale is None


def test_fuse_keeps_one_permutation():
    q = random_weight(8, 64, 4, 32, perm=True)
    k = random_weight(4, 64, 4, 32, perm=True)  # the same seed, but drawn after fewer numbers
    same = WeightData(k.values, k.scale, perm=q.perm, bits=4)
    assert torch.equal(fuse([q, same]).dequantize(), torch.cat([q.dequantize(), same.dequantize()]))
    for other in (k, WeightData(k.values, k.scale, bits=4)):
        with pytest.raises(ValueError, match="differ"):
            fuse([q, other])


@pytest.mark.parametrize(
    "other",
    [
        random_weight(4, 64, 8, 32), random_weight(4, 64, 4, 64),
        random_weight(4, 64, 4, 32, symmetric=False), WeightData(torch.zeros(4, 64)),
    ],
)  # fmt: skip
def test_fuse_refuses_unlike_parts(other):
    with pytest.raises(ValueError, match="differ"):
        fuse([random_weight(4, 64, 4, 32), other])
