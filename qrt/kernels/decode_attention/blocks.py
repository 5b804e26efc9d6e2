"""The tiles, warps and registers with which decode attention's programs go through a KV format.

They were measured on an H200 with 32 query heads and 8 KV heads of 128 (docs/kernels-journal.md). A format's
bits for K and for V (`KVFormat.widths`) choose among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from qrt.kernels.sizes import next_power_of_2
from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.base import KVFormat

DOT_COLUMNS = 8  # the least of a tensor-core dot; fewer heads cost as much
WIDE_TOKENS = 64  # most tokens of a tile whose queries take more columns
WIDE_WARPS = 2  # most warps of its program; four are a warp group


class DecodeBlock(NamedTuple):
    """The shape of one program.

    tokens     tokens of a tile
    stages     tiles in flight
    warps      warps of the program
    registers  registers of a thread, at most
    heads      KV heads that the program attends
    ahead      True to load the first tiles before the query is there
    appends    True to also store the newest tokens (`append_attention`), where the format allows it
    """

    tokens: int
    stages: int
    warps: int
    registers: int
    heads: int = 1
    ahead: bool = False
    appends: bool = False

    @property
    def heads_per_sm(self) -> int:
        """Return the KV heads that a multiprocessor attends at once.

        Each quarter of a multiprocessor has 16 Ki registers.
        """
        warps = 4 * ((1 << 14) // (32 * self.registers))
        return warps // self.warps * self.heads


class Blocks(NamedTuple):
    """The blocks for one pair of widths.

    single   the block by the fewest requests that it is for
    paired   the same for programs of two KV heads, by the columns that their queries take in a dot
    """

    single: Mapping[int, DecodeBlock]
    paired: Mapping[int, Mapping[int, DecodeBlock]] = {}


_16 = {
    1: DecodeBlock(tokens=128, stages=2, warps=4, registers=255, ahead=True),
    2: DecodeBlock(tokens=64, stages=2, warps=2, registers=255, ahead=True, appends=True),
    33: DecodeBlock(tokens=64, stages=2, warps=2, registers=255, ahead=True),
    128: DecodeBlock(tokens=64, stages=2, warps=2, registers=255),
}
_8 = {
    1: DecodeBlock(tokens=128, stages=3, warps=4, registers=255, ahead=True),
    2: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, ahead=True),
    4: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, ahead=True, appends=True),
    17: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, ahead=True),
    48: DecodeBlock(tokens=64, stages=2, warps=2, registers=128),
    192: DecodeBlock(tokens=32, stages=2, warps=1, registers=128),
}
_ONE = DecodeBlock(tokens=64, stages=5, warps=2, registers=255, ahead=True)  # for one request of 4-bit values
_SOME = DecodeBlock(tokens=64, stages=3, warps=2, registers=128)
_4 = {1: _ONE, 2: _SOME, 192: DecodeBlock(tokens=32, stages=2, warps=1, registers=128)}

MEASURED = {  # by bits of K and of V
    (16, 16): Blocks(_16),
    (8, 8): Blocks(_8, {8: _8 | {192: DecodeBlock(tokens=32, stages=2, warps=1, registers=200, heads=2)}}),
    (4, 4): Blocks(
        _4,
        {
            8: {
                1: _ONE,
                2: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, heads=2, ahead=True),
                48: DecodeBlock(tokens=64, stages=5, warps=2, registers=200, heads=2),
                192: DecodeBlock(tokens=32, stages=5, warps=1, registers=255, heads=2),
            },
            16: _4 | {2: DecodeBlock(tokens=64, stages=5, warps=2, registers=255, heads=2)},
        },
    ),
    (8, 4): Blocks(
        {1: _ONE, 2: _SOME},
        {
            8: {
                1: _ONE,
                2: DecodeBlock(tokens=64, stages=3, warps=2, registers=255, heads=2, ahead=True),
                48: DecodeBlock(tokens=64, stages=3, warps=2, registers=200, heads=2),
                192: DecodeBlock(tokens=32, stages=3, warps=1, registers=255, heads=2),
            },
            16: {
                1: _ONE,
                2: DecodeBlock(tokens=64, stages=3, warps=2, registers=255, heads=2),
                192: _SOME,
            },
        },
    ),
}
UNMEASURED = Blocks({1: _SOME})  # for other widths: fewest registers, one head, nothing ahead


def measured_block(fmt: KVFormat, requests: int, num_heads: int, num_kv_heads: int) -> DecodeBlock:
    """Return the fastest block for `requests` requests, with 16-bit queries and heads of 64 or 128.

    Queries that take more than DOT_COLUMNS get tiles of at most WIDE_TOKENS and programs of at most
    WIDE_WARPS. Triton would let four warps multiply as a group (wgmma), and ptxas 12.8, which Triton 3.6 and
    3.7 bring, then computes where an operand is from a register that holds something else
    (docs/kernels-journal.md).
    """
    blocks, group = MEASURED.get(fmt.widths, UNMEASURED), num_heads // num_kv_heads
    columns = max(DOT_COLUMNS, 2 << (group - 1).bit_length())
    paired = blocks.paired.get(columns) if num_kv_heads % 2 == 0 else None
    by_requests = paired or blocks.single
    found = by_requests[max(least for least in by_requests if least <= max(requests, 1))]
    found = found._replace(appends=found.appends and fmt.appends)
    if found.heads * next_power_of_2(group) <= DOT_COLUMNS:
        return found
    return found._replace(tokens=min(found.tokens, WIDE_TOKENS), warps=min(found.warps, WIDE_WARPS))


def block_of(measured: DecodeBlock, head_dim: int, dtype: torch.dtype) -> DecodeBlock:
    """Return the measured block, or one that fits any head if such heads were not measured."""
    if dtype is torch.float32:  # exact dots run outside the tensor cores
        return DecodeBlock(tokens=32, stages=3, warps=4, registers=255)
    return measured if head_dim <= 128 else DecodeBlock(tokens=32, stages=3, warps=2, registers=255)


def refuse_others(format: str) -> None:
    """Raise ValueError for a format that `append_attention` does not take."""
    if not KV_FORMATS[format].appends:
        some = ", ".join(name for name in KV_FORMATS if KV_FORMATS[name].appends)
        raise ValueError(
            f"format: expected one of {some}, got {format}; call kv_write, then decode_attention"
        )
