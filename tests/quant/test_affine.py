"""Every quantizer against its definition, by brute force over the codes."""

import pytest
import torch

from qrt.quant import affine
from qrt.quant.spec import Granularity, QuantSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def grouped(bits: int, symmetric: bool, group: int = 32) -> QuantSpec:
    return QuantSpec(bits, symmetric, Granularity.GROUP, group)


def weight(n: int = 12, k: int = 128, seed: int = 0) -> torch.Tensor:
    """Ordinary, one-sided, constant, all-zero, tiny, huge and outlier rows."""
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    w[1] = w[1].abs()
    w[2] = -w[2].abs()
    w[3] = 0.25
    w[4] = 0
    w[5] *= 1e-3
    w[6] *= 1e3
    w[7, ::32] = 3.0
    return w


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_are_the_nearest_on_the_stored_grid(bits, symmetric, dtype):
    spec, w = grouped(bits, symmetric), weight()
    scale, zero = affine.choose_qparams(w, spec, dtype)
    assert scale.dtype == dtype and scale.shape == (12, 4)
    assert symmetric == (zero is None) and (zero is None or zero.dtype == torch.uint8)
    codes = affine.quantize(w, scale, zero, spec)
    assert codes.dtype == torch.uint8 and int(codes.max()) < spec.levels
    error = (affine.dequantize(codes, scale, zero, bits).double() - w.double()).abs()
    center = torch.full_like(scale, spec.midpoint).double() if zero is None else zero.double()
    every = (torch.arange(spec.levels).double() - center[..., None]) * scale.double()[..., None]
    best = (w.double().view(12, 4, 32, 1) - every[:, :, None]).abs().amin(-1).view(12, 128)
    near_tie = scale.repeat_interleave(32, 1).double() * 2e-5  # fp32 holds w / scale + zero to 1.5e-5
    assert (error <= best + near_tie).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_error_is_half_a_step(bits, symmetric):
    """Also at the ends of the range, where symmetric grids put absmax half a step past the last code."""
    spec, w = grouped(bits, symmetric), weight()
    scale, zero = affine.choose_qparams(w, spec, torch.float32)
    back = affine.dequantize(affine.quantize(w, scale, zero, spec), scale, zero, bits)
    steps = (back - w).view(12, 4, 32).abs() / scale[..., None]
    assert steps.max() <= 0.5 + 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zeros(symmetric, dtype):
    spec, w = grouped(4, symmetric), torch.zeros(2, 64)
    w[1, 32:] = torch.randn(32)
    w[1, 40:50] = 0
    scale, zero = affine.choose_qparams(w, spec, dtype)
    back = affine.dequantize(affine.quantize(w, scale, zero, spec), scale, zero, 4)
    assert (scale > 0).all() and back.isfinite().all()
    assert not back[w == 0].any()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_asymmetric_range_holds_zero(bits):
    spec, w = grouped(bits, False), weight()
    scale, zero = affine.choose_qparams(w, spec, torch.float32)
    groups, step = w.view(12, 4, 32), scale * 0.5 + 1e-6
    low, high = -zero.float() * scale, (spec.levels - 1 - zero.float()) * scale
    assert (low <= step).all() and (high >= -step).all()
    assert (low - step <= groups.amin(-1).clamp(max=0)).all()
    assert (high + step >= groups.amax(-1).clamp(min=0)).all()


def definition(w: torch.Tensor, bits: int, symmetric: bool, group: int):
    """Scale, signed zero and the number that is rounded to the signed code, one by one in Python.

    As compressed-tensors defines them: docs/checkpoint-formats.md#rounding.
    """
    low_code, high_code = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for row in w.tolist():
        for start in range(0, len(row), group):
            values = row[start : start + group]
            if symmetric:
                scale, zero = max(map(abs, values)) / ((2**bits - 1) / 2), 0
            else:
                low, high = min(0.0, *values), max(0.0, *values)
                scale = (high - low) / (2**bits - 1)
                zero = min(max(round(low_code - low / scale), low_code), high_code)
            for value in values:
                yield scale, zero, min(max(value / scale + zero, low_code), high_code)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_compressed_tensors_formulas(bits, symmetric):
    spec, w = grouped(bits, symmetric), torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    scale, zero = affine.choose_qparams(w, spec, torch.float32)
    codes = affine.quantize(w, scale, zero, spec)
    scales, zeros, exact = zip(*definition(w, bits, symmetric, 32), strict=True)
    assert torch.allclose(scale.repeat_interleave(32, 1).flatten(), torch.tensor(scales), rtol=1e-6)
    mine = torch.full_like(scale, spec.midpoint) if zero is None else zero.float()
    assert (mine.repeat_interleave(32, 1).flatten() - spec.midpoint).tolist() == list(zeros)
    signed = codes.int().flatten() - spec.midpoint
    assert ((signed - torch.tensor(exact)).abs() <= 0.5 + 1e-4).all()  # absmax of a symmetric group is a tie


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_agrees_with_the_library(bits, symmetric):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    calculate = pytest.importorskip("compressed_tensors.quantization.utils").calculate_qparams
    arguments = quantization.QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy="group", group_size=32, type="int"
    )
    spec, w = grouped(bits, symmetric), weight()[[0, 1, 2, 3, 6, 7]]
    scale, zero = affine.choose_qparams(w, spec, torch.float32)
    groups = w.view(len(w), 4, 32)
    theirs, their_zero = calculate(groups.amin(-1), groups.amax(-1), arguments)
    assert torch.allclose(scale, theirs, rtol=1e-6)
    if zero is not None:
        assert torch.equal(zero.int() - spec.midpoint, their_zero.int())


def test_shrink_clips_the_range():
    spec, w = grouped(4, True), weight()
    full, _ = affine.choose_qparams(w, spec, torch.float32)
    half, _ = affine.choose_qparams(w, spec, torch.float32, shrink=0.5)
    each, _ = affine.choose_qparams(w, spec, torch.float32, shrink=torch.full_like(full, 0.5))
    assert torch.equal(half, each)
    ordinary = full > 1e-9
    assert torch.allclose(half[ordinary], full[ordinary] / 2)


def test_tokens_are_nearest_and_halves_go_up():
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[1], [9], [0], [1e-4], [50]]
    )
    codes, scale = affine.quantize_tokens(x)
    assert codes.dtype == torch.int8 and scale.shape == (5, 1) and scale.dtype == torch.float32
    wanted = x.abs().amax(1).clamp(min=1e-10) / 127  # also of zeros, which divide by it
    torch.testing.assert_close(scale[:, 0], wanted, rtol=1e-6, atol=0)
    assert ((codes * scale.double() - x.double()).abs() <= scale.double() / 2 * (1 + 1e-4)).all()
    assert codes[2].eq(0).all() and codes.abs().amax(1).tolist() == [127, 127, 0, 127, 127]
    codes, _ = affine.quantize_tokens(torch.tensor([[127.0, 0.5, -0.5, 1.5, -1.5, 2.5]]))
    assert codes.tolist() == [[127, 1, 0, 2, -1, 3]]


@pytest.mark.parametrize(
    "quantize, center", [(affine.quantize_midtread8, 128.0), (affine.quantize_midrise4, 7.5)]
)
def test_kv_grids(quantize, center):
    """The nearest level, within half a step and what rounding the scale to fp16 moves its ends."""
    x = torch.randn(7, 3, 128, generator=torch.Generator().manual_seed(2))
    x[0] = 0
    x[1] *= 1e-2
    codes, scale = quantize(x, 64)
    assert codes.dtype == torch.uint8 and scale.dtype == torch.float16 and scale.shape == (7, 3, 2)
    assert (scale > 0).all()  # zeros divide by it
    back = affine.decode_groups(codes, scale, center)
    step = scale.float().repeat_interleave(64, -1)
    assert ((back - x).abs() <= step * (0.5 + 128 * 2**-11)).all()
    every = torch.arange(256 if center == 128 else 16)
    best = (x[..., None] - (every - center) * step[..., None]).abs().amin(-1)
    assert ((back - x).abs() <= best + 1e-4 * step).all()


def test_midrise_takes_the_best_of_its_five_scales():
    """absmax is 8, 7.75, ... or 7 steps: at most half a step beyond the last level, 7.5."""
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(5))
    codes, scale = affine.quantize_midrise4(x, 32)
    every = torch.stack([(x.abs().amax(1) / m).half() for m in (8, 7.75, 7.5, 7.25, 7)], 1)
    levels = (torch.arange(16) - 7.5).double() * every.double()[..., None]  # [400, 5, 16]
    squares = (x.double()[:, None, :, None] - levels[:, :, None]).abs().amin(-1).square().sum(-1)
    lost = (affine.decode_groups(codes, scale, 7.5).double() - x.double()).square().sum(1)
    assert (scale == every).any(1).all() and squares.argmin(1).unique().numel() == 5
    torch.testing.assert_close(lost, squares.amin(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("quantize, center, loss", [
    (affine.quantize_midtread8, 128.0, 0.02), (affine.quantize_midrise4, 7.5, 0.15)
])  # fmt: skip
def test_kv_grids_keep_small_values(quantize, center, loss):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(4)) * 1e-4
    back = affine.decode_groups(*quantize(x, 64), center)
    assert (back - x).norm() < loss * x.norm()
