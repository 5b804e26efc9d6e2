"""One measured cell of the tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OPS = ("layer", "chain", "linear", "decode", "prefill", "kv_write", "elementwise", "sample")


@dataclass(frozen=True)
class Row:
    """op: the operator; what: weight scheme, KV format or the alternative's name; at: the size, `M=16` or
    `16 x 4096` (batch x context); us: time of a call; floor_us: below which no kernel gets with its bytes and
    operations; ours: whether it is an operator of qrt."""

    op: str
    what: str
    at: str
    us: float
    floor_us: float
    num_bytes: int
    flops: int
    ours: bool = True

    def as_json(self) -> dict[str, Any]:
        """For the result file: the fields and the rates they come to."""
        rates = {"gb_per_s": self.num_bytes / self.us / 1e3, "tflops": self.flops / self.us / 1e6}
        return asdict(self) | {name: round(value, 1) for name, value in rates.items()}
