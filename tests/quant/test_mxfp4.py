"""MXFP4 weights against the numbers of the OCP specification and against transformers."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qrt.errors import ConfigError, UnsupportedError
from qrt.quant import e2m1
from qrt.quant.spec import Codes, Granularity, QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData, quantized, weight_only
from qrt.quant.weight.base import fuse
from qrt.quant.weight.tiles import TiledWeight
from random_weights import random_mxfp4, random_weight, reference

CPU = torch.device("cpu")
MXFP4 = WEIGHT_SCHEMES["mxfp4"]
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one rounding


def number(code):
    """Return a float of 4 bits: exponent bias 1, one bit of mantissa, subnormals, no infinities."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def test_codes_are_floats_of_4_bits():
    want = [number(code) for code in range(16)]
    for dtype in (torch.uint8, torch.int16, torch.int64):
        got = e2m1.numbers(torch.arange(16).to(dtype))
        assert got.tolist() == want and got[8].signbit()
    assert sum(w * w for w in want) / 16 == e2m1.MEAN_SQUARE


def test_default_dtype_of_torch_changes_nothing():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert e2m1.numbers(torch.arange(16)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_scale_is_an_exact_power_of_two():
    got = e2m1.scales(torch.arange(255, dtype=torch.uint8))
    assert got.dtype == torch.bfloat16 and got.double().tolist() == [2.0 ** (s - 127) for s in range(255)]


@pytest.mark.parametrize("n, k", [(3, 32), (70, 2880)])
def test_dequantizes_as_transformers(n, k):
    weight = random_mxfp4(n, k, exponents=(-20, 10))
    low, high = weight.values.unflatten(1, (-1, 16, 2)).unbind(-1)
    exponents = (weight.scale.float().log2() + 127).to(torch.uint8)
    theirs = convert_moe_packed_tensors((low | high << 4)[None], exponents[None], dtype=torch.float32)
    assert torch.equal(weight.dequantize(), theirs[0].T)  # they hand out [in, out]


def test_rows_move_with_their_scales_and_stay_floats():
    weight = replace(random_mxfp4(6, 64), bias=torch.arange(6.0))
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    moved = weight.rows(order)
    assert torch.equal(moved.dequantize(), weight.dequantize()[order]) and torch.equal(moved.bias, order)


def test_fused_parts_stay_floats():
    first, second = random_mxfp4(4, 64), random_mxfp4(6, 64, seed=1)
    fused = fuse([first, second])
    assert torch.equal(fused.dequantize(), torch.cat((first.dequantize(), second.dequantize())))
    with pytest.raises(ValueError, match="codes"):
        fuse([first, random_weight(6, 64, 4, 32, dtype=torch.bfloat16)])


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("n, k", [(64, 128), (70, 160), (1, 32), (33, 2880)])
def test_tiles_hold_the_weight_exactly(n, k, dtype):
    """Scales from the smallest to one that the units of a bf16 plane do not hold."""
    for exponents in ((-127, -120), (-5, 2), (10, 30), (100, 120)):
        weight = random_mxfp4(n, k, exponents=exponents)
        tiles = TiledWeight(*MXFP4.prepare(weight, CPU, dtype))
        assert torch.equal(tiles.dequantize(4, k, Codes.E2M1), weight.dequantize())
        assert not tiles.zero.numel() and not tiles.perm.numel()


@pytest.mark.parametrize("tokens, dtype", product([0, 1, 17], UNIT), ids=str)
def test_definition(tokens, dtype):
    weight = random_mxfp4(70, 160)
    x, bias = torch.randn(tokens, 160).to(dtype), torch.randn(70).to(dtype)
    want = reference(x, weight, bias)
    error = (MXFP4.linear_ref(x, MXFP4.prepare(weight, CPU, dtype), bias).double() - want).abs()
    assert error.shape == (tokens, 70) and (error <= UNIT[dtype] * want.abs() + 1e-4).all()


@pytest.mark.parametrize("tokens", [0, 1, 64, 65, 130])
@pytest.mark.parametrize("n, k", [(64, 32), (192, 160)])
def test_product_of_torch_on_a_cpu(n, k, tokens):
    """The numbers are exact, so that the result alone is rounded."""
    for exponents in ((-110, -100), (-5, 2), (60, 90)):
        weight = random_mxfp4(n, k, exponents=exponents)
        tensors = MXFP4.prepare_cpu(weight, torch.bfloat16)
        assert len(tensors) == 3 and MXFP4.out_features(tensors) == n
        x, bias = torch.randn(tokens, k).bfloat16(), torch.randn(n).bfloat16()
        y = MXFP4.linear_cpu(x, tensors, None)
        assert y.shape == (tokens, n) and y.dtype == torch.bfloat16
        want, magnitude = reference(x, weight), x.double().abs() @ weight.dequantize().double().abs().T
        assert ((y.double() - want).abs() <= UNIT[y.dtype] * want.abs() + 1e-6 * magnitude).all()
        assert torch.equal(MXFP4.linear_cpu(x, tensors, bias), y + bias)
    assert len(MXFP4.prepare_cpu(random_mxfp4(7, k), torch.bfloat16)) == len(TiledWeight._fields)
    assert len(MXFP4.prepare_cpu(weight, torch.float32)) == len(TiledWeight._fields)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w8a8", "fp16"])
def test_other_schemes_refuse_floats_of_4_bits(scheme):
    with pytest.raises(UnsupportedError, match=f"{scheme}: .*got .*4-bit"):
        WEIGHT_SCHEMES[scheme].prepare(random_mxfp4(4, 64), CPU, torch.bfloat16)


def test_integers_are_refused():
    with pytest.raises(
        UnsupportedError, match="mxfp4: expected 4-bit e2m1 codes .* got 4-bit codes in groups of 32"
    ):
        MXFP4.prepare(random_weight(4, 64, 4, 32), CPU, torch.bfloat16)


def test_nothing_is_rounded_to_mxfp4():
    assert "mxfp4" not in quantized() and weight_only()[4] == "w4a16"
    with pytest.raises(ConfigError, match="e2m1 codes: expected 4 bits without zero points, got symmetric 8"):
        QuantSpec(8, True, Granularity.GROUP, 32, Codes.E2M1)
    with pytest.raises(AssertionError, match="no zero points"):
        WeightData(torch.zeros(1, 32), torch.ones(1, 1), torch.zeros(1, 1), bits=4, codes=Codes.E2M1)
