"""All rounding of the project: every quantizer on the CPU is one of these functions.

Device functions (`*/device.py`) repeat the arithmetic in Triton and are tested against this file.
A scale is first rounded to its stored dtype; codes are then chosen in fp32 with the *rounded* scale.
Rounding in bf16 misplaces 9-12 % of int8 codes (docs/checkpoint-formats.md#rounding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.quant.spec import QuantSpec

INT8_MAX = 127  # symmetric int8 activations: scale = absmax / 127
_TINY = 1e-10  # a scale is never zero: an all-zero group decodes to zeros, not to NaN


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.float().unflatten(-1, (-1, group))


def choose_qparams(
    weight: Tensor, spec: QuantSpec, dtype: torch.dtype, shrink: float | Tensor = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Choose the scale and zero with which `weight` [N, K] is rounded to nearest.

    Returns scale [N, K/G] in `dtype` and zero [N, K/G] uint8 (None when symmetric).
    Symmetric: scale = absmax / ((2^b - 1) / 2); asymmetric: the range, widened to hold 0, over 2^b - 1
    (compressed-tensors' conventions). `shrink` (a factor, or a tensor [N, K/G]) clips the range.
    """
    groups = _grouped(weight, spec.group_of(weight.shape[-1]))
    if spec.symmetric:
        scale = groups.abs().amax(-1) * shrink * (2 / (spec.levels - 1))
        return _storable(scale, dtype), None
    low = groups.amin(-1).clamp(max=0) * shrink
    high = groups.amax(-1).clamp(min=0) * shrink
    scale = _storable((high - low) / (spec.levels - 1), dtype)
    zero = torch.round(-low / scale.float()).clamp(0, spec.levels - 1)
    return scale, zero.to(torch.uint8)


def _storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `scale` to `dtype`; the smallest normal replaces zero and all that would underflow to zero."""
    floor = max(_TINY, torch.finfo(dtype).tiny)
    return scale.clamp(min=floor).to(dtype)


def quantize(weight: Tensor, scale: Tensor, zero: Tensor | None, spec: QuantSpec) -> Tensor:
    """Round `weight` [N, K] to codes uint8 [N, K] on the grid of `scale`, `zero` [N, K/G]; ties to even."""
    groups = _grouped(weight, weight.shape[-1] // scale.shape[-1])
    offset = spec.midpoint if zero is None else zero.float()[..., None]
    return nearest(groups, scale.float()[..., None], offset, spec).to(torch.uint8).flatten(-2)


def nearest(x: Tensor, scale: Tensor, zero: Tensor | int, spec: QuantSpec) -> Tensor:
    """Round `x` to codes, still in fp32; x, scale and zero are fp32 and broadcast, ties go to even."""
    return (x / scale).add_(zero).round_().clamp_(0, spec.levels - 1)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """Return (code - zero) * scale, fp32 [N, K]: codes uint8 [N, K], scale [N, K/G], zero uint8 or None."""
    return decode_groups(codes, scale, 1 << (bits - 1) if zero is None else zero.float()[..., None])


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize tokens to int8: x [..., K] -> codes int8 [..., K], scale fp32 [..., 1]; x ~ codes * scale.

    scale = absmax / 127; halves round up (`floor(v + 0.5)`), as the device code does.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=_TINY) / INT8_MAX
    return torch.floor(x / scale + 0.5).clamp(-128, 127).to(torch.int8), scale


def _kv_scale(scale: Tensor) -> Tensor:
    """Round `scale` to fp16, clamped to its range; subnormals are used, so a V of 1e-4 keeps its levels."""
    half = torch.finfo(torch.float16)
    return scale.clamp(half.smallest_normal * half.eps, half.max).to(torch.float16)


def quantize_midtread8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize K or V to int8: x [..., D] -> codes uint8 [..., D], scale fp16 [..., D/group].

    A value is (code - 128) * scale.
    """
    groups = _grouped(x, group)
    scale = _kv_scale(groups.abs().amax(-1) / INT8_MAX)
    codes = torch.floor(groups / scale.float()[..., None] + 128.5)
    return codes.clamp(0, 255).to(torch.uint8).flatten(-2), scale


MIDRISE_STEPS = (8.0, 7.75, 7.5, 7.25, 7.0)  # absmax in steps; none clips


def quantize_midrise4(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize K or V to int4: x [..., D] -> codes uint8 0..15 [..., D], scale fp16 [..., D/group].

    A value is (code - 7.5) * scale. The sixteen levels lie around zero, without a zero point
    (docs/kv-layout.md#grids). scale = absmax / m with the m of MIDRISE_STEPS that errs least. How the largest
    values fall between two levels decides a fifth of the squared error of a group of 32.
    """
    groups = _grouped(x, group)
    absmax = groups.abs().amax(-1)
    scale = _kv_scale(absmax / MIDRISE_STEPS[0])
    least = _midrise_error(groups, scale)
    for steps in MIDRISE_STEPS[1:]:
        candidate = _kv_scale(absmax / steps)
        error = _midrise_error(groups, candidate)
        scale, least = torch.where(error < least, candidate, scale), torch.minimum(error, least)
    return _midrise_codes(groups, scale).to(torch.uint8).flatten(-2), scale


def _midrise_codes(groups: Tensor, scale: Tensor) -> Tensor:
    return (torch.floor(groups / scale.float()[..., None]) + 8).clamp(0, 15)


def _midrise_error(groups: Tensor, scale: Tensor) -> Tensor:
    """Return the sum of squared errors of each group at `scale`."""
    return ((_midrise_codes(groups, scale) - 7.5) * scale.float()[..., None] - groups).square().sum(-1)


def decode_groups(codes: Tensor, scale: Tensor, center: Tensor | float) -> Tensor:
    """Return (code - center) * scale in fp32, the inverse of every grid.

    codes [..., D], scale [..., D/group]; center is a number, or fp32 [..., D/group, 1].
    """
    groups = _grouped(codes, codes.shape[-1] // scale.shape[-1])
    return (groups - center).mul_(scale.float()[..., None]).flatten(-2)
