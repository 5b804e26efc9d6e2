"""How the products over tiles are launched: by measured plans (`qrt.kernels.tuned`) or rules of thumb."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from qrt.kernels.sizes import next_power_of_2


class FusedPlan(NamedTuple):
    """How `fused_kernel` is launched for one shape.

    blocks   row blocks of a program
    splits   splits of K
    warps    warps of a program
    stages   tiles in flight
    """

    blocks: int
    splits: int
    warps: int
    stages: int

    @property
    def gates(self) -> bool:
        """Return whether a program may have a gate and its up."""
        return (self.blocks, self.splits) == (2, 1)


def width_of(tokens: int) -> int:
    """Return BM, the columns of the dot for so many tokens."""
    return 8 if tokens <= 8 else max(16, next_power_of_2(tokens))


@lru_cache(maxsize=1 << 10)
def tuning_key(k: int, n: int, bits: int, width: int) -> str:
    """Return the key of a plan in `qrt.kernels.tuned`."""
    return f"tiles {k}x{n} {bits} bits {width} wide"


@lru_cache(maxsize=1 << 10)
def fused_plan(width: int, blocks: int, tiles: int) -> FusedPlan:
    """Return a plan where nothing was measured.

    Programs fill 132 SMs about twice, and no share of K is long while programs are few. The constants are
    those that won on an H200 for Llama-3-8B's shapes.
    """
    splits = next_power_of_2(-(-(256 if width <= 32 else 192) // blocks))
    if width <= 32 and tiles > 8 * splits and blocks * splits <= 256:
        splits *= 2
    crowded = blocks * splits >= 448  # smaller programs, so that more fit on an SM
    warps = 2 if width == 8 or (width == 16 and crowded) else 4
    return FusedPlan(1, even_splits(splits, tiles), warps, 4 if width == 8 and splits == 1 else 3)


def even_splits(splits: int, tiles: int) -> int:
    """Return at most `splits` and at most 16 splits, each with a tile."""
    return -(-tiles // -(-tiles // min(splits, tiles, 16)))


class WidePlan(NamedTuple):
    """How `wide_kernel` is launched for one shape.

    tokens       tokens of a program, BM
    blocks       row blocks of a program
    splits       splits of K
    x_planes     planes of x in a stage, XP
    x_stages     stages of x in flight, XS
    w_stages     stages of w in flight, WS
    groups       groups of warps that do not wait for each other: of a block or two each, or two of one block
    persistent   programs of an SM that take all blocks in turn, where K is not split; or 0
    """

    tokens: int
    blocks: int
    splits: int
    x_planes: int
    x_stages: int
    w_stages: int
    groups: int = 1
    persistent: int = 0

    @property
    def turns(self) -> bool:
        """Return whether two groups have one row block, and its tiles in turn."""
        return (self.blocks, self.groups) == (1, 2)

    @property
    def group_blocks(self) -> int:
        """Return the row blocks of a group."""
        return 1 if self.turns else self.blocks // self.groups

    @property
    def gates(self) -> bool:
        """Return whether a group may have as many rows of a gate as of its up."""
        return self.splits == 1 and not self.turns


@lru_cache(maxsize=1 << 10)
def wide_plan(width: int, blocks: int, tiles: int, sms: int) -> WidePlan:
    """Return a plan where nothing was measured.

    It has the widest block of tokens, and splits K while SMs are idle. Many blocks of 256 tokens are taken in
    turn, by one group.
    """
    tokens = min(width, 256)
    token_blocks = -(-width // tokens)
    rows = 1 if blocks * token_blocks <= sms else 2
    splits = even_splits(max(1, min(sms // (-(-blocks // rows) * token_blocks), tiles // 4)), tiles)
    if (tokens, rows) == (256, 2):
        return WidePlan(256, 2, 1, 1, 4, 2, 1, persistent=1)
    return WidePlan(tokens, rows, splits, 1 if tokens == 256 else 2, 4, 4 // rows, groups=rows)


@lru_cache(maxsize=1 << 10)
def int8_tuning_key(k: int, n: int, width: int) -> str:
    """Return the key of a plan for int8 tokens in `qrt.kernels.tuned`."""
    return f"int8 tiles {k}x{n} {width} wide"


@lru_cache(maxsize=1 << 10)
def wide_int8_plan(width: int, blocks: int, tiles: int, sms: int) -> WidePlan:
    """Return a plan for int8 tokens where nothing was measured.

    Two groups take turns where row blocks are few; many have several groups, of many tokens two that stay.
    The constants are those that won on an H200 for Llama-3-8B's shapes.
    """
    tokens = min(width, 128)
    token_blocks = -(-width // tokens)
    outputs = blocks * token_blocks
    if outputs <= sms:
        most = (2 * sms // outputs, tiles // 4) if width <= 32 else (sms // outputs, tiles // 16)
        splits = even_splits(max(1, min(most)), tiles)
        return WidePlan(tokens, 1, splits, 4 if tokens <= 64 else 2, 3, 3, groups=2)
    if tokens < 128 or outputs <= 2 * sms:
        return WidePlan(tokens, 2, 1, 2, 4, 3, groups=2 if tokens < 128 else 1)
    if token_blocks <= 2:
        return WidePlan(tokens, 4, 1, 2, 4, 2, groups=4)
    return MANY_INT8


def expert_block(assignments: int, experts: int, int8: bool = False) -> int:
    """Return BM, the places of a block of Hopper's kernel, for so many assignments of tokens to experts.

    A block of 64 columns takes 0.6, one of 256 takes 1.8 times as long as one of 128; one of 32 takes 0.8 of
    one of 64, as the weights take the time. Of `int8` tokens one of 64 takes 0.57. So it was with the experts
    of Qwen3-30B-A3B and Mixtral. An expert has half a block of padding on average.
    """
    average = assignments / min(assignments, experts)
    blocks = _INT8_EXPERT_BLOCKS if int8 else _EXPERT_BLOCKS
    return next(block for most, block in blocks if average <= most)


_EXPERT_BLOCKS = ((24, 32), (80, 64), (512, 128), (float("inf"), 256))  # (most assignments an expert, BM)
_INT8_EXPERT_BLOCKS = ((12, 32), (160, 64), (float("inf"), 128))


def expert_plan(block: int, owners: int, rows: int, words: int, sms: int) -> WidePlan:
    """Return a plan for blocks of places of `owners` experts, whose weights have `rows` row blocks each.

    Up to 64 places four groups share the tokens, as those and the weights share the way from the L2 cache;
    two programs of two groups, while there are few blocks. About 140 KB are in flight on an SM, where 40
    would do for a memory of 5 TB/s that answers in a microsecond. More places have the plans that won for
    dense products; of experts only the width of blocks was measured for more than 10 assignments each.
    """
    stages = 64 // words  # as many bytes in stages, whatever the words of a tile
    if block >= 128:
        narrow = block == 128
        return WidePlan(block, 2, 1, 1 + narrow, (4 - narrow) * stages, 2 * stages, 1, persistent=1)
    if owners * -(-rows // 4) < 4 * sms:
        return WidePlan(block, 2, 1, 2, 3 * stages, 3 * stages, groups=2, persistent=2)
    return WidePlan(block, 4, 1, 2, 4 * stages, (3 if block == 64 else 4) * stages, 4, persistent=1)


MANY_INT8 = WidePlan(128, 4, 1, 4, 2, 3, groups=2, persistent=1)  # of many int8 tokens
# gate_up and down of experts, by BM: of Qwen3-30B-A3B's, these won on an H200. down scatters its rows, for
# which MANY_INT8 spills 864 bytes
INT8_EXPERTS = {
    64: (
        WidePlan(64, 4, 1, 4, 3, 3, groups=4, persistent=1),
        WidePlan(64, 4, 1, 4, 3, 3, groups=2, persistent=1),
    ),
    128: (MANY_INT8, WidePlan(128, 2, 1, 4, 3, 3, groups=2, persistent=1)),
}


def registers(plan: WidePlan) -> tuple[int, int]:
    """Return the registers of a thread of the kernel, and of a thread of the groups behind the first.

    The 4 warps that copy give most of theirs to the others.
    """
    own = 4 * plan.group_blocks * plan.groups
    warps = own + 4
    most = (1 << 16) // (32 * warps) // 8 * 8
    each = min(max(plan.tokens, 64) // 2 + (48 if plan.blocks <= 2 else 64), most, 168)
    return each, (warps * each - 4 * 24) // own // 8 * 8


PLANS: dict[str, Any] = {"fused": FusedPlan, "wide": WidePlan}  # by their names in `qrt.kernels.tuned`
