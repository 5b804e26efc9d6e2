"""Group scales that are whole multiples of one scale a channel, so that a weight is int8 codes of channels.

After QServe's progressive groups (Lin et al. 2024, arXiv:2405.04532). A weight of 4-bit codes u with a scale
g and a zero point z for each group of a row is progressive if

    g[n, j] = c[n] * s[n, j]                  s whole, c one scale of the row
    -128 <= (u - z) * s <= 127                for all codes u of 0 to 15, so s is at most 16

Then (u - z) * s are int8 codes, which share c over all inputs. Files store g alone: c and s come back
exactly, because c is the greatest common divisor of a row's scales. Scales are integers times powers of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qrt.errors import UnsupportedError

BITS = 4
MOST_STEPS = 16
_LAST, _MIDPOINT = 15, 8  # the last code; the zero point of a symmetric weight
_MANTISSA = 2.0**24  # makes the mantissa of every stored scale (fp32 at most) an integer
_FARTHEST = 30  # powers of two between scales of a row that int64 holds; progressive ones differ by 4
_OFFSET = 128  # between int8 codes and bytes


class Progressive(NamedTuple):
    """What groups are progressive by.

    steps     uint8 [N, K/G]   s; 0 where the scale is 0
    offsets   uint8 [N, K/G]   128 - z * s: a byte u * s + offset is the int8 code plus 128
    channel   fp32 [N]         c; 0 where all scales of a row are 0
    """

    steps: Tensor
    offsets: Tensor
    channel: Tensor

    def codes(self, values: Tensor) -> Tensor:
        """Return (u - z) * s of codes u, uint8 [N, K]: int8 [N, K]."""
        grouped = values.unflatten(1, (self.steps.shape[1], -1))
        return int8_codes(grouped, self.steps[..., None], self.offsets[..., None]).flatten(1)


def int8_codes(codes: Tensor, steps: Tensor, offsets: Tensor) -> Tensor:
    """Return u * s + offset - 128 of bytes that broadcast, int8; nothing wraps around."""
    return (codes * steps).add_(offsets).bitwise_xor_(_OFFSET).view(torch.int8)


def split(scale: Tensor, zero: Tensor | None) -> Progressive:
    """Return what groups of 4-bit codes with these scales and zero points [N, K/G] are progressive by.

    `zero` is uint8, or None for 8. Raises UnsupportedError where a row is not progressive.
    """
    usable = (scale >= 0) & scale.isfinite()
    wide = scale.double().where(usable, 0)
    mantissa, exponent = torch.frexp(wide)
    least = exponent.masked_fill(wide == 0, torch.iinfo(exponent.dtype).max).amin(1, keepdim=True)
    distance = (exponent - least).clamp(0, _FARTHEST)
    whole = (mantissa * _MANTISSA).long() << distance
    steps = whole // _common_divisor(whole).clamp(min=1)
    center = torch.full_like(steps, _MIDPOINT) if zero is None else zero.long()
    fits = usable & (center * steps <= 128) & ((_LAST - center) * steps <= 127)
    if not fits.all():
        raise _refusal(scale, steps, fits)
    channel = wide.amax(1) / steps.amax(1).clamp(min=1)  # exact
    return Progressive(steps.to(torch.uint8), (_OFFSET - center * steps).to(torch.uint8), channel.float())


def _common_divisor(whole: Tensor) -> Tensor:
    """Return the greatest common divisor of each row [N, M], int64 [N, 1]."""
    while (count := whole.shape[1]) > 1:
        half = count // 2
        divisor = torch.gcd(whole[:, :half], whole[:, half : 2 * half])
        whole = torch.cat((divisor, whole[:, 2 * half :]), 1)
    return whole


def _refusal(scale: Tensor, steps: Tensor, fits: Tensor) -> UnsupportedError:
    row, group = (~fits).nonzero()[0].tolist()
    found = int(steps[row, group]) or "no number of"
    return UnsupportedError(
        f"group scales: expected each row's to be one number times whole steps of 1 to {MOST_STEPS}, such "
        f"that no (code - zero point) * step leaves int8, got {scale[row, group].item():.6g} in row {row}, "
        f"which is {found} steps; quantize the original with --scheme w4a8, or run it as w4a16: "
        "qrt-calibrate convert --weight-only"
    )


def round_channel(channel: Tensor, dtype: torch.dtype) -> Tensor:
    """Round positive scales c to fp32 ones whose products with 1 to 16 are all exact in `dtype`.

    c keeps four bits fewer than `dtype` has: 4 of bf16, 7 of fp16, 20 of fp32; subnormal ones keep fewer.
    """
    facts = torch.finfo(dtype)
    smallest = facts.smallest_normal * facts.eps
    wide = channel.double().clamp(min=smallest)
    units = 2 / (facts.eps * MOST_STEPS)  # in a mantissa of one
    unit = (wide / torch.frexp(wide).mantissa / units).clamp(min=smallest)  # a power of two, exact
    return ((wide / unit).round() * unit).float()
