"""How the products over tiles are launched: by plans that were measured (`qrt.kernels.tuned`), or by rules of
thumb."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from qrt.kernels.sizes import next_power_of_2


class FusedPlan(NamedTuple):
    """How `_fused` of `kernel` is launched for one shape."""

    blocks: int  # row blocks a program
    splits: int
    warps: int
    stages: int

    @property
    def gates(self) -> bool:
        """Whether a program may have a gate and its up."""
        return (self.blocks, self.splits) == (2, 1)


def width_of(tokens: int) -> int:
    """BM: columns of the dot for so many tokens."""
    return 8 if tokens <= 8 else max(16, next_power_of_2(tokens))


@lru_cache(maxsize=1 << 10)
def tuning_key(k: int, n: int, bits: int, width: int) -> str:
    """Of a plan in `qrt.kernels.tuned`."""
    return f"tiles {k}x{n} {bits} bits {width} wide"


@lru_cache(maxsize=1 << 10)
def fused_plan(width: int, blocks: int, tiles: int) -> FusedPlan:
    """Where nothing was measured: enough programs to fill 132 SMs about twice, and no share of K that is
    long while there are few. The constants are those that won on an H200 for Llama-3-8B's shapes."""
    splits = next_power_of_2(-(-(256 if width <= 32 else 192) // blocks))
    if width <= 32 and tiles > 8 * splits and blocks * splits <= 256:
        splits *= 2
    crowded = blocks * splits >= 448  # smaller programs, so that more fit on an SM
    warps = 2 if width == 8 or (width == 16 and crowded) else 4
    return FusedPlan(1, even_splits(splits, tiles), warps, 4 if width == 8 and splits == 1 else 3)


def even_splits(splits: int, tiles: int) -> int:
    """At most `splits` and 16, and none without a tile."""
    return -(-tiles // -(-tiles // min(splits, tiles, 16)))


class WidePlan(NamedTuple):
    """How `wide_kernel` is launched for one shape."""

    tokens: int  # BM
    blocks: int  # of rows a program
    splits: int
    x_planes: int  # XP
    x_stages: int  # XS
    w_stages: int  # WS
    groups: int = 1  # of warps that do not wait for each other: of a block or two each, or two of one block
    persistent: int = 0  # programs an SM that take all blocks in turn, where K is not split, or 0

    @property
    def turns(self) -> bool:
        """Whether two groups have one row block, and tiles in turn."""
        return (self.blocks, self.groups) == (1, 2)

    @property
    def group_blocks(self) -> int:
        """Row blocks of a group."""
        return 1 if self.turns else self.blocks // self.groups

    @property
    def gates(self) -> bool:
        """Whether a group may have as many rows of a gate as of its up."""
        return self.splits == 1 and not self.turns


@lru_cache(maxsize=1 << 10)
def wide_plan(width: int, blocks: int, tiles: int, sms: int) -> WidePlan:
    """Where nothing was measured: the widest block of tokens, K split while some of the SMs are idle. Many
    blocks of 256 tokens are taken in turn, by one group."""
    tokens = min(width, 256)
    token_blocks = -(-width // tokens)
    rows = 1 if blocks * token_blocks <= sms else 2
    splits = even_splits(max(1, min(sms // (-(-blocks // rows) * token_blocks), tiles // 4)), tiles)
    if (tokens, rows) == (256, 2):
        return WidePlan(256, 2, 1, 1, 4, 2, 1, persistent=1)
    return WidePlan(tokens, rows, splits, 1 if tokens == 256 else 2, 4, 4 // rows, groups=rows)


def registers(plan: WidePlan) -> tuple[int, int]:
    """Of a thread of such a kernel, and of one of the groups behind the first: the 4 warps of the copies give
    most of theirs."""
    own = 4 * plan.group_blocks * plan.groups
    warps = own + 4
    most = (1 << 16) // (32 * warps) // 8 * 8
    each = min(max(plan.tokens, 64) // 2 + (48 if plan.blocks <= 2 else 64), most, 168)
    return each, (warps * each - 4 * 24) // own // 8 * 8


PLANS: dict[str, Any] = {"fused": FusedPlan, "wide": WidePlan}  # by their names there
