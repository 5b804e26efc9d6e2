"""The layouts and the reference of w4a8 against its definition in integers, by hand."""

from dataclasses import replace

import pytest
import torch

from qrt.errors import UnsupportedError
from qrt.quant import affine
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.quant.weight.base import fuse
from qrt.quant.weight.tiles import TiledWeight
from random_weights import random_weight, reference, relative

W4A8 = WEIGHT_SCHEMES["w4a8"]
CPU = torch.device("cpu")
SHAPES = [(64, 256, 128), (70, 96, 32), (130, 160, 32), (65, 320, 64), (40, 192, 96), (17, 200, None),
          (33, 1024, 512), (9, 1, None)]  # fmt: skip


def both(weight: WeightData, dtype=torch.bfloat16):
    """Return the run-time tensors of either kind."""
    return W4A8.prepare(weight, CPU, dtype), W4A8.prepare_cpu(weight, dtype)


def by_hand(x, weight, channel, bias):
    """Return sums of integer products, times the scales of tokens and channels, fp64.

    The integers are the weight over its channel's scale.
    """
    codes, scale = affine.quantize_tokens(x)
    integers = weight.dequantize().double() / channel.double()[:, None]
    assert torch.equal(integers, integers.round()) and integers.abs().max() <= 128
    total = codes.long() @ integers.long().T
    return total * scale.double() * channel.double() + (0 if bias is None else bias.double())


@pytest.mark.parametrize("n, k, group", SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_layouts_multiply_by_the_definition(dtype, symmetric, n, k, group):
    weight = random_weight(n, k, 4, group, symmetric=symmetric, dtype=dtype, perm=True, progressive=True)
    x, bias = torch.randn(6, k).to(dtype) * 3, torch.randn(n).to(dtype)
    x[2] = 0
    tiles, rows = both(weight, dtype)
    want = by_hand(x, weight, TiledWeight(*tiles).channel, bias)
    unit = torch.finfo(dtype).eps / 2
    for tensors in (tiles, rows):
        assert W4A8.out_features(tensors) == n
        y = W4A8.linear_cpu(x, tensors, bias)
        assert y.dtype == dtype and ((y.double() - want).abs() <= unit * want.abs() + 1e-5).all()
        assert torch.equal(y, W4A8.linear_int8_ref(QuantizedTokens.of(x), tensors, bias))
        assert relative(W4A8.linear_cpu(x.float(), tensors, None), want - bias.double()) < 1e-6
        assert W4A8.linear_cpu(x[:0], tensors, None).shape == (0, n)
    assert torch.equal(W4A8.linear_ref(x, tiles, bias), W4A8.linear_cpu(x, rows, bias))


@pytest.mark.parametrize("n, k, group", SHAPES)
def test_tiles_are_those_of_w4a16_and_what_is_behind(n, k, group):
    """The steps and offsets of each run lie in one word or two; padding is 0 times anything."""
    weight = random_weight(n, k, 4, group, symmetric=False, dtype=torch.bfloat16, progressive=True)
    tiles = TiledWeight(*W4A8.prepare(weight, CPU, torch.bfloat16))
    shared = WEIGHT_SCHEMES["w4a16"].prepare(weight, CPU, torch.bfloat16)
    assert all(map(torch.equal, tiles[:5], shared[:5]))
    blocks, count, rows, words = tiles.packed.shape
    assert tiles.steps.shape == (blocks, count, rows, 2 * max(tiles.runs, 2)) and tiles.steps.is_contiguous()
    assert tiles.channel.shape == (n,) and tiles.channel.dtype == torch.float32
    run = 4 * words // tiles.runs
    for block, tile, row, at in torch.cartesian_prod(*map(torch.arange, tiles.steps.shape)).tolist():
        n_, k_ = 64 * block + row, tile * 4 * words + at // 2 * run
        step, zero = 0, 0
        if n_ < n and k_ < k and at // 2 < tiles.runs:
            group_of = k_ // (group or k)
            step = weight.scale[n_, group_of].item() / tiles.channel[n_].item()
            zero = weight.zero[n_, group_of].item()
        assert tiles.steps[block, tile, row, at].item() == (step, 128 - zero * step)[at % 2]


@pytest.mark.parametrize("zero", [None, 0, 7, 8, 15])
def test_extremes_stay_exact(zero):
    """The largest codes of all signs and tokens of -128 to 127 fill no more than int32."""
    most = {None: 16, 0: 8, 7: 15, 8: 16, 15: 8}[zero]
    scale = torch.tensor([[float(most), 1.0] * 64])
    zeros = None if zero is None else torch.full((1, 128), zero, dtype=torch.uint8)
    for code in (0, 15):
        weight = WeightData(torch.full((1, 128 * 128), code, dtype=torch.uint8), scale, zeros, bits=4)
        for tokens in (-128, 127):
            x = QuantizedTokens(
                torch.full((1, 128 * 128), tokens, dtype=torch.int8), torch.ones(1), torch.float32
            )
            want = (code - (8 if zero is None else zero)) * (most + 1) * 64 * 128 * tokens
            for tensors in both(weight):
                assert W4A8.linear_int8_ref(x, tensors, None).item() == want


def test_a_cpu_multiplies_unpacked_codes():
    weight = random_weight(40, 128, 4, 32, progressive=True)
    tiles, rows = both(weight)
    assert rows[0].shape == (40, 128) and rows[0].dtype == torch.int8
    assert "quantized first" in W4A8.explain_cpu(rows) and "linear_ref" in W4A8.explain_cpu(tiles)


def test_parts_of_a_fused_weight_keep_their_channels():
    parts = [random_weight(n, 128, 4, 32, progressive=True, seed=n) for n in (32, 16, 17)]
    x = torch.randn(3, 128)
    apart = torch.cat([W4A8.linear_cpu(x, W4A8.prepare_cpu(p, x.dtype), None) for p in parts], 1)
    for tensors in both(fuse(parts)):
        assert torch.equal(W4A8.linear_cpu(x, tensors, None), apart)


def test_it_is_near_the_unquantized_product():
    weight, x = random_weight(64, 512, 4, 128, progressive=True), torch.randn(8, 512)
    assert relative(W4A8.linear_cpu(x, W4A8.prepare_cpu(weight, x.dtype), None), reference(x, weight)) < 0.01


@pytest.mark.parametrize(
    "prepare", [W4A8.prepare_cpu, lambda weight, dtype: W4A8.prepare(weight, CPU, dtype)]
)
def test_other_weights_are_refused(prepare):
    weight = random_weight(4, 64, 4, 32, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="group scales: expected .*, got .* in row 0, .*--scheme w4a8"):
        prepare(weight, torch.bfloat16)
    for other in (random_weight(4, 64, 8, 32), WeightData(torch.zeros(4, 64)), random_weight(4, 64, 4, 16)):
        with pytest.raises(UnsupportedError, match="w4a8: expected 4-bit codes in groups"):
            prepare(replace(other), torch.bfloat16)
