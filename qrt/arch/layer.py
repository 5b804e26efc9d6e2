"""`Layer`: what may differ from layer to layer of an architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer.

    rope      key of `Arch.ropes`; None: no positions
    window    tokens that a query attends, itself included; None: all
    segment   tokens of the segments that a text is cut into; a query attends none of segments before its own
              (chunked attention); None: all
    q_scaled  q is multiplied by `Arch.q_scale`
    sparse    the mlp is a mixture of experts
    """

    rope: str | None = "all"
    window: int | None = None
    segment: int | None = None
    q_scaled: bool = True
    sparse: bool = False


class Reach(NamedTuple):
    """How far back a query attends: `Layer.window` and `Layer.segment`, of which one is 0; 0: all tokens."""

    window: int = 0
    segment: int = 0

    @property
    def most(self) -> int:
        """The most tokens that a query attends; 0: all."""
        return self.window or self.segment


@dataclass(frozen=True)
class QScale:
    """The factor of q by its position p: 1 + strength * ln(1 + floor((p + first) / length))."""

    strength: float
    length: int
    first: int = 0
