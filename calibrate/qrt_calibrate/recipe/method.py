"""Calibration methods: where channel scales come from and how weights are rounded. METHODS lists them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scales(Enum):
    """How channel scales are chosen; they move from a source into its readers."""

    NONE = "none"
    AWQ = "awq"
    SMOOTHQUANT = "smoothquant"


@dataclass(frozen=True)
class Method:
    """How a method rounds.

    scales   how channel scales are searched
    clip     whether the range of each group is searched; otherwise it keeps its extremes
    gptq     whether later columns compensate for the rounding errors of earlier ones
    rows     whether later rows do so too, as far as the loss's gradients at both rows agree (YAQA)
    """

    scales: Scales
    clip: bool
    gptq: bool
    rows: bool = False

    @property
    def needs_text(self) -> bool:
        """Whether the method looks at activations."""
        return self.scales is not Scales.NONE or self.clip or self.gptq


METHODS = {
    "rtn": Method(Scales.NONE, clip=False, gptq=False),
    "awq": Method(Scales.AWQ, clip=True, gptq=False),
    "gptq": Method(Scales.NONE, clip=True, gptq=True),
    "awq-gptq": Method(Scales.AWQ, clip=True, gptq=True),
    "awq-yaqa": Method(Scales.AWQ, clip=True, gptq=True, rows=True),
    "smoothquant": Method(Scales.SMOOTHQUANT, clip=False, gptq=False),
    "smoothquant-gptq": Method(Scales.SMOOTHQUANT, clip=False, gptq=True),
}
