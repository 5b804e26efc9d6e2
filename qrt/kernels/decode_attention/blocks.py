"""How decode attention goes through a KV format: the tiles, warps and registers of its programs.

They were measured on an H200 at 32 query and 8 KV heads of 128 (docs/kernels-journal.md), and are found by
the bits that a format declares for K and for V (`KVFormat.widths`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.base import KVFormat

DOT_COLUMNS = 8  # of a tensor core's, at least; heads that do not fill them cost as much


class DecodeBlock(NamedTuple):
    """How one program works.

    tokens     of a tile
    stages     tiles in flight
    warps      of the program
    registers  of a thread, at most
    heads      KV heads that it attends
    ahead      whether it loads the first tiles before the query is there
    appends    whether it also stores the newest tokens (`append_attention`), where the format allows it
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
        """Return the KV heads that a multiprocessor attends at once: each of its quarters has 16 Ki
        registers."""
        warps = 4 * ((1 << 14) // (32 * self.registers))
        return warps // self.warps * self.heads


class Blocks(NamedTuple):
    """The blocks of one pair of widths.

    single   by the fewest requests that a block is for
    paired   the same for two KV heads to a program, by the columns of a dot that their queries take
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
UNMEASURED = Blocks({1: _SOME})  # of other widths: fewest registers, one head, nothing ahead


def measured_block(fmt: KVFormat, requests: int, num_heads: int, num_kv_heads: int) -> DecodeBlock:
    """Return the block that is fastest for `requests` requests, with heads of 64 or 128 in 16 bits."""
    blocks, group = MEASURED.get(fmt.widths, UNMEASURED), num_heads // num_kv_heads
    columns = max(DOT_COLUMNS, 2 << (group - 1).bit_length())
    paired = blocks.paired.get(columns) if num_kv_heads % 2 == 0 else None
    by_requests = paired or blocks.single
    found = by_requests[max(least for least in by_requests if least <= max(requests, 1))]
    return found if fmt.appends else found._replace(appends=False)


def block_of(measured: DecodeBlock, head_dim: int, dtype: torch.dtype) -> DecodeBlock:
    """Return the measured block, or one that any head fits where it was not measured for such heads."""
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
