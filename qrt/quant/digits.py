"""Activations as two int8 digits a value: 16 bits to an int8 product that reads its other operand once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128  # inputs that share a scale
STEPS = 127 * 256  # of a scale, up to the largest magnitude: what two digits hold


class Digits(NamedTuple):
    """x [T, K], K in groups of 128: x ~ (256 * high + low) * scale, within half a scale.

    The scale is a 32,512th of the group's largest magnitude: what bf16 holds exactly is kept to a 65,000th of
    that.

    codes    int8 [K / 128, 2, B, 128], T <= B: high digits, low digits; the lane 2*j + h of a group is its
             input 64*h + j, which is where `tiles` has the weights' codes
    facts    fp32 [2, K / 128, B]: the scale; the sum of 256 * high + low
    tokens   T; what lies beyond is not written
    """

    codes: Tensor
    facts: Tensor
    tokens: int

    @classmethod
    def empty(cls, tokens: int, inputs: int, room: int, device: torch.device) -> Digits:
        """Not written yet: `room` is B."""
        groups = inputs // GROUP
        codes = torch.empty(groups, 2, room, GROUP, dtype=torch.int8, device=device)
        return cls(codes, torch.empty(2, groups, room, device=device), tokens)
