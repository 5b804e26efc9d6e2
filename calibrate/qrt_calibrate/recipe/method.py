"""What a calibration method is: where its channel scales come from, and how it rounds; METHODS lists them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scales(Enum):
    """Where the scales that move between a source and its readers come from."""

    NONE = "none"
    AWQ = "awq"
    SMOOTHQUANT = "smoothquant"


@dataclass(frozen=True)
class Method:
    """What a method does.

    scales   how channel scales are searched
    clip        whether a group's range is searched, or its extremes are kept
    gptq        whether columns make good for the errors of columns before them
    rows        and rows for those of rows before them, as far as the model's loss feels both alike (YAQA)
    """

    scales: Scales
    clip: bool
    gptq: bool
    rows: bool = False

    @property
    def needs_text(self) -> bool:
        """Whether it looks at activations."""
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
