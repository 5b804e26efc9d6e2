"""Name the operators, and hold one measured cell of their tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OPS = (
    "layer", "chain", "linear", "experts", "decode", "prefill", "kv_write", "elementwise", "sample",
    "all-reduce",
)  # fmt: skip


@dataclass(frozen=True)
class KernelRow:
    """Hold one measured cell.

    op         the operator
    what       the weight scheme, the KV format, or the alternative's name
    at         the size: `M=16`, or `16 x 4096` (batch x context)
    us         time of a call
    floor_us   the time that no kernel can beat with these bytes and operations
    ours       whether it is an operator of qrt
    """

    op: str
    what: str
    at: str
    us: float
    floor_us: float
    num_bytes: int
    flops: int
    ours: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the fields, with the rates that follow from them, for the result file."""
        rates = {"gb_per_s": self.num_bytes / self.us / 1e3, "tflops": self.flops / self.us / 1e6}
        return asdict(self) | {name: round(value, 1) for name, value in rates.items()}
