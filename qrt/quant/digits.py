"""Activations as two int8 digits a value: 16 bits to an int8 product that reads its other operand once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128  # inputs that share a scale
STEPS = 127 * 256  # of a scale, up to the largest magnitude: what two digits hold
MOST_TOKENS = 16  # that products by digits are fast for


def room_for(tokens: int) -> int:
    """Of the `Digits` of so many tokens."""
    return 8 if tokens <= 8 else MOST_TOKENS


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
        facts = torch.empty(2, groups, room, dtype=torch.float32, device=device)
        return cls(codes, facts, tokens)

    def write(self, x: Tensor) -> None:
        """Hold x [T, K]; what is not finite makes its group's scale so."""
        groups = x.float().unflatten(1, (-1, GROUP)).transpose(0, 1)  # [K / 128, T, 128]
        scale = groups.abs().amax(-1).clamp(min=1e-30) / STEPS
        steps = (groups / scale[..., None]).nan_to_num().round().int()
        lanes = steps.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        high = (lanes + 128) >> 8
        self.codes[:, :, : self.tokens] = torch.stack((high, lanes - 256 * high), 1).to(torch.int8)
        self.facts[:, :, : self.tokens] = torch.stack((scale, steps.sum(-1).float()))

    def read(self) -> Tensor:
        """x fp32 [T, K]."""
        high, low = self.codes[:, :, : self.tokens].int().unbind(1)
        steps = (256 * high + low).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return (steps * self.facts[0, :, : self.tokens, None]).transpose(0, 1).flatten(1)
