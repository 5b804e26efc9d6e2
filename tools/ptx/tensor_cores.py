"""Multiply small matrices with one warp (mma) or four (wgmma)."""

from __future__ import annotations

import numpy as np

from ptx.grid import Grid
from ptx.tensors import swizzled
from ptx.text import Instruction, groups, names_of
from ptx.values import Fault, Lanes, Read, Work, bits_of, elements, whole_warps

_WIDTHS = {1: 128, 2: 64, 3: 32}  # bytes of a swizzle, by the last two bits of a descriptor


def _rows_of(grid: Grid, operands: list[str], kind: str):
    """Return a function from lanes to A [warps, 16, k].

    Operands alternate between rows 0..7 and rows 8..15. Lane 4 r + j holds word j of row r, and in the second
    pair of operands word 4 + j.
    """
    reads = [grid.reader(name, "b32") for name in operands]

    def rows(lanes: Lanes) -> np.ndarray:
        words = [read(lanes).reshape(-1, 8, 4) for read in reads]
        upper, lower = np.concatenate(words[0::2], 2), np.concatenate(words[1::2], 2)
        return elements(np.concatenate([upper, lower], 1), kind)

    return rows


def _sums(grid: Grid, to: list[str], of: list[str], out: str):
    """Return a function (lanes, A [warps, 16, k], B [warps, n, k]) that writes A B^T + `of` to `to`.

    Lane 4 r + j holds columns 2 j and 2 j + 1 of row r. The next two operands hold rows 8..15, and the next
    four the next 8 columns.
    """
    writes, reads = [grid.writer(name) for name in to], [grid.reader(name, out) for name in of]
    wide, narrow = (np.float64, np.float32) if out == "f32" else (np.int64, np.int32)

    def add(lanes: Lanes, left: np.ndarray, right: np.ndarray) -> None:
        total = left.astype(wide) @ right.astype(wide).swapaxes(1, 2)
        warps, _, n = total.shape
        parts = total.reshape(warps, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, -1)
        for k, write in enumerate(writes):
            value = parts[k] + reads[k](lanes) if reads else parts[k]
            write(lanes, value.astype(narrow))

    return add


def _multiply(grid: Grid, i: Instruction) -> Work:
    *_, out, kind, _, _ = i.opcode
    to, a, b, c = map(names_of, i.operands)
    rows, add = _rows_of(grid, a, kind), _sums(grid, to, c, out)
    columns = [grid.reader(name, "b32") for name in b]

    def multiply(lanes: Lanes) -> None:
        words = [read(whole_warps(lanes)).reshape(-1, 8, 4) for read in columns]
        add(lanes, rows(lanes), elements(np.concatenate(words, 2), kind))

    return multiply


def _group_multiply(grid: Grid, i: Instruction) -> Work:
    if i.opcode[1] == "fence":
        return lambda lanes: None
    if i.opcode[1] == "commit_group":
        return grid.products.commit
    if i.opcode[1] == "wait_group":
        pending = int(i.operands[0])
        return lambda lanes: grid.products.finish(whole_warps(lanes), pending)
    n, k = map(int, groups(r"m64n(\d+)k(\d+)", i.opcode[4]).groups())
    out, kind = i.opcode[5:7]
    to, descriptor = names_of(i.operands[0]), grid.reader(i.operands[2], "u64")
    more, first, adds = _sums(grid, to, to, out), _sums(grid, to, [], out), grid.reader(i.operands[3], "pred")
    signs, turned = i.operands[4:6], [flag == "1" for flag in i.operands[6:]] or [False]
    if signs not in ([], ["1", "1"]):
        raise NotImplementedError(i.text)
    if i.operands[1].startswith("{"):
        rows: Read = _rows_of(grid, names_of(i.operands[1]), kind)
    else:
        left = grid.reader(i.operands[1], "u64")

        def rows(lanes: Lanes) -> np.ndarray:
            warps = lanes[::32]
            place = _place(grid, warps, left(warps), (16, k), kind, turned[0], warps // 32 % 4)
            return elements(_watched(grid, lanes, place), kind)

    def multiply(lanes: Lanes) -> None:
        warps = whole_warps(lanes)[::32]
        if adds(lanes).any() != adds(lanes).all():
            raise Fault("threads differ in whether they add")
        right = _watched(grid, lanes, _place(grid, warps, descriptor(warps), (n, k), kind, turned[-1]))
        (more if adds(lanes).all() else first)(lanes, rows(lanes), elements(right, kind))

    return multiply


def _place(
    grid: Grid, warps: Lanes, descriptor: np.ndarray, shape: tuple[int, int], kind: str, turned: bool,
    band: np.ndarray | int = 0,
) -> np.ndarray:  # fmt: skip
    """Return where an operand [rows, k] is in shared memory, from row shape[0] * band on.

    The result is [warps, rows, bytes]. The operand's lines of 128, 64 or 32 bytes, depending on the swizzle,
    run along k, or along the rows if it is transposed.
    """
    fields = ((descriptor >> np.uint64(at)) & np.uint64(0x3FFF) for at in (0, 16, 32))
    start, leading, stride = (field.astype(np.int64)[:, None, None] << 4 for field in fields)
    width, size = _WIDTHS[int(descriptor[0] >> np.uint64(62))], bits_of(kind) // 8
    row = np.arange(shape[0])[None, :, None] + shape[0] * np.broadcast_to(band, len(warps))[:, None, None]
    k, line = np.arange(shape[1]), width // size
    if turned:
        at = row % line * size + row // line * leading + k % 8 * width + k // 8 * stride
    else:
        at = row % 8 * width + row // 8 * stride + k * size
    place = swizzled((start + at)[..., None] + np.arange(size), width)
    if place.max() >= grid.shared_bytes:
        raise Fault("an operand beyond shared memory")
    return (grid.program[warps][:, None, None, None] * grid.shared_bytes + place).reshape(*at.shape[:2], -1)


def _watched(grid: Grid, lanes: Lanes, place: np.ndarray) -> np.ndarray:
    """Return the words at `place`; they must be unchanged when these threads have waited for the product."""
    data, flat = grid.shared[place], place.reshape(len(place), -1)
    grid.races.read(lanes[::32], flat)
    index = {int(lane): k for k, lane in enumerate(lanes[::32])}

    def check(due: Lanes) -> None:
        which = [index[int(lane)] for lane in due[::32]]
        grid.races.read(due[::32], flat[which])
        if (grid.shared[place[which]] != data[which]).any():
            raise Fault("an operand of a product has changed before it was waited for")

    grid.products.add(lanes, check)
    return data.view(np.uint32)


OPERATIONS = {"mma": _multiply, "wgmma": _group_multiply}
