"""Activations as two int8 digits per value: an int8 product gets 16 bits and reads its weights once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128  # inputs that share a scale
STEPS = 127 * 256  # scales in the largest magnitude: the most that two digits hold
MOST_TOKENS = 16  # products by digits are fast up to this number of tokens


def room_for(tokens: int) -> int:
    """Return the padded token count of a `Digits` that holds `tokens` tokens: 8 or 16."""
    return 8 if tokens <= 8 else MOST_TOKENS


class Digits(NamedTuple):
    """x [T, K] with K in groups of 128: x ~ (256 * high + low) * scale, to within half a scale.

    The scale is 1/32,512 of the group's largest magnitude, so the error is at most 1/65,000 of that.

    codes    int8 [K / 128, 2, B, 128] with T <= B: high digits, low digits. Lane 2*j + h of a group is its
             input 64*h + j, where `tiles` has the weights' codes
    facts    fp32 [2, K / 128, B]: the scales, and the sums of 256 * high + low
    tokens   T; tokens beyond are not written
    """

    codes: Tensor
    facts: Tensor
    tokens: int

    @classmethod
    def empty(cls, tokens: int, inputs: int, room: int, device: torch.device) -> Digits:
        """Return digits that are not written yet; `room` is B."""
        groups = inputs // GROUP
        codes = torch.empty(groups, 2, room, GROUP, dtype=torch.int8, device=device)
        facts = torch.empty(2, groups, room, dtype=torch.float32, device=device)
        return cls(codes, facts, tokens)

    def write(self, x: Tensor) -> None:
        """Store x [T, K]; a value that is not finite makes the scale of its group not finite."""
        groups = x.float().unflatten(1, (-1, GROUP)).transpose(0, 1)  # [K / 128, T, 128]
        scale = groups.abs().amax(-1).clamp(min=1e-30) / STEPS
        steps = (groups / scale[..., None]).nan_to_num().round().int()
        lanes = steps.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        high = (lanes + 128) >> 8
        self.codes[:, :, : self.tokens] = torch.stack((high, lanes - 256 * high), 1).to(torch.int8)
        self.facts[:, :, : self.tokens] = torch.stack((scale, steps.sum(-1).float()))

    def read(self) -> Tensor:
        """Return x, fp32 [T, K]."""
        high, low = self.codes[:, :, : self.tokens].int().unbind(1)
        steps = (256 * high + low).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return (steps * self.facts[0, :, : self.tokens, None]).transpose(0, 1).flatten(1)
