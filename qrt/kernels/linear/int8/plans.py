"""How the int8 products are launched: by measured plans (`qrt.kernels.tuned`) or rules of thumb."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from qrt.kernels.sizes import cdiv, next_power_of_2


class BlockPlan(NamedTuple):
    """How `block_kernel` is launched: tokens, outputs and inputs of a block, splits of K, warps, stages."""

    tokens: int
    outputs: int
    inputs: int
    splits: int
    warps: int
    stages: int


def width_of(tokens: int) -> int:
    """Return the largest of the token counts that share a plan with `tokens`.

    It is a power of two, the same for all counts up to 16 and for all above 1024.
    """
    return min(max(16, next_power_of_2(tokens)), 2048)


@lru_cache(maxsize=1 << 10)
def tuning_key(k: int, n: int, width: int) -> str:
    """Return the key of a plan in `qrt.kernels.tuned`."""
    return f"int8 {k}x{n} {width} wide"


def block_plan(width: int) -> BlockPlan:
    """Return a plan where nothing was measured."""
    if width <= 64:  # reading the weight takes the time: blocks are narrow, so that every SM reads
        return BlockPlan(width, 32, 256, 1, 4, 4)
    return BlockPlan(128, 128, 128, 1, 8, 3)


class HopperPlan(NamedTuple):
    """How `hopper_kernel` is launched.

    tokens       tokens of a block
    outputs      outputs of a block
    splits       splits of K
    stages       stages in flight
    persistent   programs of an SM that take all blocks in turn, where K is not split; or 0
    """

    tokens: int
    outputs: int
    splits: int
    stages: int
    persistent: int = 0

    @property
    def gates(self) -> bool:
        """Return whether a thread has gate and up of a column: each warp has rows of both halves."""
        return self.splits == 1 and self.outputs >= 128


def hopper_plan(tokens: int, n: int, sms: int) -> HopperPlan | None:
    """Return a plan where nothing was measured; None where reading the weights takes the time.

    Triton's int8 wgmma takes at most 128 columns, so large blocks grow in outputs.
    """
    if tokens <= 128:
        return None
    many = cdiv(tokens, 128) * cdiv(n, 256) >= sms
    return HopperPlan(128, 256 if many else 128, 1, 4)


PLANS: dict[str, Any] = {"block": BlockPlan, "hopper": HopperPlan}  # by their names in `qrt.kernels.tuned`
