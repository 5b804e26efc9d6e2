"""Define the instructions that move data between tensors, shared memory and registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ptx.grid import Grid
from ptx.tensors import Descriptor, swizzled
from ptx.text import Instruction, groups, names_of
from ptx.values import SHARED_BASE, UNSIGNED, Fault, Lanes, Work, bits_of, dense, dtype_of, whole_warps

_BOX_ALIGNMENT = 128  # of the address in shared memory that a box is copied to


def signal(
    grid: Grid, key: tuple[int, int], arrivals: int = 0, asked_bytes: int = 0, come_bytes: int = 0,
    warp: int | None = None,
) -> None:  # fmt: skip
    """Tell the mbarrier of a program and an address about arrivals, and about bytes to expect or arrived."""
    if key not in grid.barriers:
        raise Fault(f"no mbarrier at {key[1]}")
    barrier = grid.barriers[key]
    if warp is not None:
        barrier.known = np.maximum(barrier.known, grid.races.knows[warp])
        grid.races.go_on(warp)
    barrier.pending -= arrivals
    barrier.missing_bytes += asked_bytes - come_bytes
    if barrier.pending < 0:
        raise Fault(f"more arrivals than the {barrier.count} of the mbarrier at {key[1]}")
    if barrier.pending == 0 and barrier.missing_bytes == 0:
        barrier.pending, barrier.phase = barrier.count, barrier.phase + 1
        grid.wake(("mbarrier", *key))


def in_shared(grid: Grid, lanes: Lanes, address: np.ndarray, count: int) -> np.ndarray:
    """Return where in `grid.shared` the `count` bytes of each lane's address are, [lanes, count]."""
    if (address < SHARED_BASE).any() or (address + count > grid.shared_bytes).any():
        raise Fault(f"{count} bytes at {address.min()} to {address.max()} of {grid.shared_bytes} shared ones")
    return (grid.program[lanes] * grid.shared_bytes + address)[:, None] + np.arange(count)


def _check_aligned(address: np.ndarray, count: int) -> None:
    if (address % count).any():
        raise Fault(f"{count} bytes at {int(address[address % count != 0][0]):#x}")


def _read(grid: Grid, space: str, lanes: Lanes, address: np.ndarray, count: int) -> np.ndarray:
    _check_aligned(address, count)
    if space.startswith("shared"):
        place = in_shared(grid, lanes, address, count)
        grid.races.read(lanes, place)
        return grid.shared[place]
    data, early = np.empty((len(lanes), count), np.uint8), address[~_is_alone(grid, lanes)]
    for (begin, end), there in grid.tensors.before.items():
        place = early[(early >= begin) & (early < end)] - begin
        if there[np.minimum(place[:, None] + np.arange(count), end - begin - 1)].any():
            raise Fault("what a kernel before may still write is read before that is waited for")
    for which, tensor, place in grid.tensors.find(address, count):
        data[which] = tensor[place]
    return data


def _write_shared(
    grid: Grid, lanes: Lanes, place: np.ndarray, data: np.ndarray, knew: np.ndarray | None = None
) -> None:
    grid.races.write(lanes, place, grid.shared[place] != data, knew)
    grid.shared[place] = data
    if ((grid.shared[place] != data) & grid.races.by_others(lanes, place)).any():
        raise Fault("two warps write different values to one place at once")


def _is_alone(grid: Grid, lanes: Lanes) -> np.ndarray:
    """Return whether these threads know that the kernel before is done."""
    return grid.races.knows[lanes // 32, -1] > 0


def _write(grid: Grid, space: str, lanes: Lanes, address: np.ndarray, data: np.ndarray) -> None:
    count = data.shape[1]
    _check_aligned(address, count)
    if space.startswith("shared"):
        _write_shared(grid, lanes, in_shared(grid, lanes, address, count), data)
        return
    if not _is_alone(grid, lanes).all():
        raise Fault("a tensor is written before the kernel before is waited for")
    for which, tensor, place in grid.tensors.find(address, count, write=True):
        tensor[place] = data[which]


def _move(grid: Grid, i: Instruction) -> Work:
    kind, (to, of) = i.opcode[-1], map(names_of, i.operands)
    if kind == "pred" or len(to) == len(of):
        read, write = grid.reader(of[0], kind), grid.writer(to[0])
        return lambda lanes: write(lanes, read(lanes))
    bits = bits_of(kind)
    if len(of) > 1:
        reads, write = [grid.reader(name, f"b{bits // len(of)}") for name in of], grid.writer(to[0])
        return lambda lanes: write(
            lanes, np.stack([read(lanes) for read in reads], 1).view(UNSIGNED[bits])[:, 0]
        )
    read, writes = grid.reader(of[0], kind), [grid.writer(name) for name in to]

    def unpack(lanes: Lanes) -> None:
        parts = dense(read(lanes)).view(UNSIGNED[bits // len(to)]).reshape(-1, len(to))
        for part, write in zip(parts.T, writes, strict=True):
            write(lanes, dense(part))

    return unpack


def _address_of(grid: Grid, i: Instruction) -> Work:
    read, write = grid.reader(i.operands[1], "b64"), grid.writer(i.operands[0])
    return lambda lanes: write(lanes, read(lanes))


def _load(grid: Grid, i: Instruction) -> Work:
    space, dtype = i.opcode[1], dtype_of(i.opcode[-1])
    if space == "param":
        return _load_parameter(grid, i)
    writes, address = [grid.writer(name) for name in names_of(i.operands[0])], grid.addresses(i.operands[1])

    def load(lanes: Lanes) -> None:
        data = _read(grid, space, lanes, address(lanes), dtype.itemsize * len(writes)).view(dtype)
        for part, write in zip(data.T, writes, strict=True):
            write(lanes, dense(part))

    return load


def _load_parameter(grid: Grid, i: Instruction) -> Work:
    write, bits, address = grid.writer(i.operands[0]), bits_of(i.opcode[-1]), grid.addresses(i.operands[1])

    def load(lanes: Lanes) -> None:
        places, which = np.unique(address(lanes), return_inverse=True)
        values = np.empty(len(places), UNSIGNED[bits])
        for k, place in enumerate(places.tolist()):
            value = grid.parameter(place)
            if isinstance(value, float):
                value = int(np.float32(value).view(np.uint32))
            assert isinstance(value, int)
            values[k] = value % (1 << bits)
        write(lanes, values[which])

    return load


def _store(grid: Grid, i: Instruction) -> Work:
    space, address = i.opcode[1], grid.addresses(i.operands[0])
    reads = [grid.reader(name, i.opcode[-1]) for name in names_of(i.operands[1])]

    def store(lanes: Lanes) -> None:
        values = np.stack([read(lanes) for read in reads], 1)
        _write(grid, space, lanes, address(lanes), dense(values).view(np.uint8))

    return store


def _atomic(grid: Grid, i: Instruction) -> Work:
    functions: dict[str, Callable[..., np.ndarray]] = {
        "add": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "exch": lambda old, new: new,
    }
    function = next(functions[part] for part in i.opcode if part in functions)
    write, address = grid.writer(i.operands[0]), grid.addresses(i.operands[1])
    read, dtype = grid.reader(i.operands[2], i.opcode[-1]), dtype_of(i.opcode[-1])

    def atomic(lanes: Lanes) -> None:
        for lane in lanes[:, None]:
            old = _read(grid, "global", lane, address(lane), dtype.itemsize).view(dtype)[:, 0]
            new = dense(function(old, read(lane)))
            _write(grid, "global", lane, address(lane), new.view(np.uint8)[None])
            write(lane, old)

    return atomic


def _copy(grid: Grid, i: Instruction) -> Work:
    if i.opcode[1:4] == ["async", "bulk", "tensor"]:
        return _copy_box(grid, i)
    if i.opcode[:2] != ["cp", "async"]:
        raise NotImplementedError(i.text)
    if i.opcode[2] == "commit_group":
        return grid.fetches.commit
    if i.opcode[2] == "wait_group":
        left = int(i.operands[0], 0)
        return lambda lanes: grid.fetches.finish(lanes, left)
    if i.opcode[2] not in ("ca", "cg"):
        raise NotImplementedError(i.text)
    to, of, count = grid.addresses(i.operands[0]), grid.addresses(i.operands[1]), int(i.operands[2], 0)
    wanted = grid.reader(i.operands[3] if len(i.operands) > 3 else i.operands[2], "u32")

    def copy(lanes: Lanes) -> None:
        place, source, some = to(lanes), of(lanes), wanted(lanes) > 0  # copies all bytes, or writes zeros
        data = np.zeros((len(lanes), count), np.uint8)
        if some.any():
            data[some] = _read(grid, "global", lanes[some], source[some], count)
        at = dict(zip(lanes.tolist(), range(len(lanes)), strict=True))
        knew = grid.races.knows[lanes // 32]
        _check_aligned(place, count)

        def deliver(due: Lanes) -> None:
            which = [at[lane] for lane in due.tolist()]
            _write_shared(grid, due, in_shared(grid, due, place[which], count), data[which], knew[which])

        grid.fetches.add(lanes, deliver)

    return copy


def _copy_box(grid: Grid, i: Instruction) -> Work:
    to, barrier = grid.addresses(i.operands[0]), grid.addresses(i.operands[2])
    name, at = groups(r"\[\s*(\S+?)\s*,\s*\{(.*)\}\s*\]$", i.operands[1]).groups()
    tensor, places = grid.reader(name, "u64"), [grid.reader(place, "s32") for place in names_of(at)]

    def copy(lanes: Lanes) -> None:
        for lane in lanes[:, None]:
            first = [int(place(lane)[0]) for place in reversed(places)]
            grid.fetchers[lane // 32] = True
            _check_aligned(to(lane), _BOX_ALIGNMENT)
            box, program = grid.parameter(int(tensor(lane)[0])), int(grid.program[lane[0]])
            assert isinstance(box, Descriptor)
            knew = grid.races.knows[lane[0] // 32].copy()
            if not knew[-1] and any(begin <= box.address < end for begin, end in grid.tensors.before):
                raise Fault("what a kernel before may still write is copied before that is waited for")
            place = program, int(to(lane)[0]), int(barrier(lane)[0])
            grid.copies.append(partial(_arrive, grid, box, first, *place, knew))

    return copy


def _arrive(
    grid: Grid, tensor: Descriptor, first: list[int], program: int, to: int, barrier: int, knew: np.ndarray
) -> None:  # fmt: skip
    """Deliver what a copy was asked for, and signal its mbarrier.

    `knew` is what the warp that asked for it knew (see `Races`).
    """
    data = tensor.read(first)
    if to % (8 * tensor.swizzle or 128) or to + len(data) > grid.shared_bytes:
        raise Fault(f"a copy of {len(data)} bytes to {to}, swizzled by {tensor.swizzle}")
    place = program * grid.shared_bytes + swizzled(to + np.arange(len(data)), tensor.swizzle)
    grid.races.copy(place, knew, grid.barriers[program, barrier].known)
    grid.shared[place] = data
    signal(grid, (program, barrier), come_bytes=len(data))


def _matrices(grid: Grid, lanes: Lanes, address: np.ndarray, count: int) -> np.ndarray:
    """Return where rows of `count` 8 x 8 matrices of 16 bits are, [warps, count, 8, bytes].

    Lane 8 m + r has the address of row r of matrix m.
    """
    _check_aligned(address, 16)
    first, rows = whole_warps(lanes)[::32], address.reshape(-1, 32)[:, : 8 * count].reshape(-1)
    return in_shared(grid, first.repeat(8 * count), rows, 16).reshape(len(first), count, 8, 16)


def _load_matrices(grid: Grid, i: Instruction) -> Work:
    writes, address = [grid.writer(name) for name in names_of(i.operands[0])], grid.addresses(i.operands[1])

    def load(lanes: Lanes) -> None:
        place = _matrices(grid, lanes, address(lanes), len(writes))
        grid.races.read(lanes[::32], place.reshape(len(place), -1))
        data = grid.shared[place].view(np.uint16)
        if "trans" in i.opcode:
            data = data.swapaxes(2, 3)
        words = dense(data).view(np.uint32).reshape(len(data), len(writes), 32)
        for k, write in enumerate(writes):
            write(lanes, words[:, k].reshape(-1))

    return load


def _store_matrices(grid: Grid, i: Instruction) -> Work:
    reads = [grid.reader(name, "b32") for name in names_of(i.operands[1])]
    address = grid.addresses(i.operands[0])

    def store(lanes: Lanes) -> None:
        place = _matrices(grid, lanes, address(lanes), len(reads))
        words = np.stack([read(lanes).reshape(-1, 32) for read in reads], 1)
        data = words.view(np.uint16).reshape(*words.shape[:2], 8, 8)
        if "trans" in i.opcode:
            data = data.swapaxes(2, 3)
        flat = place.reshape(len(place), -1)
        _write_shared(grid, lanes[::32], flat, dense(data).view(np.uint8).reshape(flat.shape))

    return store


OPERATIONS = {
    "mov": _move, "cvta": _address_of, "ld": _load, "st": _store, "atom": _atomic, "cp": _copy,
    "ldmatrix": _load_matrices, "stmatrix": _store_matrices,
}  # fmt: skip
