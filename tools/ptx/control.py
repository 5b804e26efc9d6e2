"""Define the instructions between threads: jumps, barriers, mbarriers, and exchange within a warp."""

from __future__ import annotations

import numpy as np

from ptx.grid import Barrier, Grid
from ptx.memory import signal
from ptx.text import Instruction
from ptx.values import LANE, Fault, Lanes, Work, whole_warps


def _nothing(grid: Grid, i: Instruction) -> Work:
    return lambda lanes: None


def _other_kernels(grid: Grid, i: Instruction) -> Work:
    def wait(lanes: Lanes) -> None:
        grid.races.knows[lanes // 32, -1] = 1

    def let_start(lanes: Lanes) -> None:
        grid.hasty[grid.program[lanes[grid.races.knows[lanes // 32, -1] == 0]]] = True

    return {"wait": wait, "launch_dependents": let_start}[i.opcode[1]]


def _jump(grid: Grid, i: Instruction) -> Work:
    def jump(lanes: Lanes) -> None:
        grid.pc[lanes] = grid.code.labels[i.operands[0]]

    return jump


def _jump_by_table(grid: Grid, i: Instruction) -> Work:
    read = grid.reader(i.operands[0], "u32")

    def jump(lanes: Lanes) -> None:
        places = [grid.code.labels[label] for label in grid.code.tables[i.operands[1]]]
        grid.pc[lanes] = np.array(places)[read(lanes)]

    return jump


def _end(grid: Grid, i: Instruction) -> Work:
    def end(lanes: Lanes) -> None:
        grid.done[whole_warps(lanes)[::32] // 32] = True

    return end


def _check_whole(lanes: Lanes) -> None:
    whole_warps(lanes)


def _barrier(grid: Grid, i: Instruction) -> Work:
    if i.opcode[1] == "warp":
        return _check_whole
    if i.opcode[1] != "sync":
        raise NotImplementedError(i.text)
    number, count = grid.reader(i.operands[0], "u32"), None
    if len(i.operands) > 1:
        count = grid.reader(i.operands[1], "u32")

    def meet(lanes: Lanes) -> None:
        first = whole_warps(lanes)[::32]
        wanted = count(first) if count else np.full(len(first), grid.threads)
        for lane, which, threads in zip(first, number(first), wanted, strict=True):
            key = int(grid.program[lane]), int(which)
            met = grid.met.setdefault(key, [])
            met.append(int(lane) // 32)
            if 32 * len(met) > threads:
                raise Fault(f"{32 * len(met)} threads at barrier {which} of {threads}")
            grid.wait(("barrier", *key), met[-1])
            if 32 * len(met) == threads:
                known = grid.races.knows[grid.met.pop(key)].max(0)
                grid.races.go_on(np.array(met))
                grid.races.meet(grid.wake(("barrier", *key)), known)

    return meet


def _mbarrier(grid: Grid, i: Instruction) -> Work:
    name = i.opcode[1]
    if name == "try_wait":
        return _try_wait(grid, i)
    if name not in ("init", "inval", "arrive"):
        raise NotImplementedError(i.text)
    operands = i.operands if i.operands[0].startswith("[") else i.operands[1:]
    address = grid.addresses(operands[0])
    number = grid.reader(operands[1] if len(operands) > 1 else "1", "u32")

    def act(lanes: Lanes) -> None:
        for lane, at, amount in zip(lanes, address(lanes), number(lanes), strict=True):
            key, amount = (int(grid.program[lane]), int(at)), int(amount)
            if name == "init":
                grid.barriers[key] = Barrier(amount, amount, np.zeros_like(grid.races.knows[0]))
            elif name == "inval":
                grid.barriers.pop(key)
            elif "expect_tx" in i.opcode:
                signal(grid, key, arrivals=1, asked_bytes=amount, warp=int(lane) // 32)
            else:
                signal(grid, key, arrivals=amount, warp=int(lane) // 32)

    return act


def _try_wait(grid: Grid, i: Instruction) -> Work:
    """Let threads wait until the phase of this parity is over, so the instruction never says no."""
    write, address = grid.writer(i.operands[0]), grid.addresses(i.operands[1])
    parity = grid.reader(i.operands[2], "u32")

    def wait(lanes: Lanes) -> None:
        at, wanted = address(lanes), parity(lanes)
        for warp in np.unique(lanes // 32):
            own = np.flatnonzero(lanes // 32 == warp)
            key = int(grid.program[warp * 32]), int(at[own[0]])
            if key not in grid.barriers:
                raise Fault(f"no mbarrier at {key[1]}")
            if (at[own] != key[1]).any() or (wanted[own] != wanted[own[0]]).any():
                raise Fault("threads of a warp wait for different mbarriers")
            if grid.barriers[key].phase & 1 != wanted[own[0]]:
                write(lanes[own], np.ones(len(own), bool))
                grid.races.meet([int(warp)], grid.barriers[key].known)
            else:
                grid.pc[lanes[own]] -= 1
                grid.wait(("mbarrier", *key), int(warp))

    return wait


def _elect(grid: Grid, i: Instruction) -> Work:
    write = grid.writer(i.operands[0].split("|")[1])
    return lambda lanes: write(whole_warps(lanes), lanes % 32 == 0)


def _shuffle(grid: Grid, i: Instruction) -> Work:
    mode, write = i.opcode[2], grid.writer(i.operands[0].split("|")[0])
    value, other, clamp = (grid.reader(operand, "u32") for operand in i.operands[1:4])

    def shuffle(lanes: Lanes) -> None:
        lane = whole_warps(lanes) % 32
        b, c = other(lanes).astype(np.int64) & 31, clamp(lanes).astype(np.int64)
        segment = (c >> 8) & 31
        last, first = (lane & segment) | (c & 31 & ~segment), lane & segment
        source = {"bfly": lane ^ b, "idx": first | (b & ~segment), "down": lane + b, "up": lane - b}[mode]
        source = np.where(source >= last if mode == "up" else source <= last, source, lane)
        write(lanes, value(lanes)[np.arange(len(lanes)) - lane + source])

    return shuffle


def _vote(grid: Grid, i: Instruction) -> Work:
    mode, write, read = i.opcode[2], grid.writer(i.operands[0]), grid.reader(i.operands[1], "pred")

    def vote(lanes: Lanes) -> None:
        flags = read(whole_warps(lanes)).reshape(-1, 32)
        words = {"ballot": lambda: (flags.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, np.uint32),
                 "any": lambda: flags.any(1), "all": lambda: flags.all(1)}[mode]()  # fmt: skip
        write(lanes, words.repeat(32))

    return vote


def _reduce(grid: Grid, i: Instruction) -> Work:
    write, read = grid.writer(i.operands[0]), grid.reader(i.operands[1], i.opcode[-1])
    function = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}[i.opcode[2]]

    def reduce(lanes: Lanes) -> None:
        values = read(whole_warps(lanes)).reshape(-1, 32)
        write(lanes, function.reduce(values, 1, dtype=values.dtype).repeat(32))

    return reduce


def _trap(grid: Grid, i: Instruction) -> Work:
    def trap(lanes: Lanes) -> None:
        raise Fault(f"{len(lanes)} threads trap")

    return trap


OPERATIONS = {
    "trap": _trap,
    "bra": _jump, "brx": _jump_by_table, "ret": _end, "exit": _end, "bar": _barrier, "barrier": _barrier,
    "mbarrier": _mbarrier, "elect": _elect, "shfl": _shuffle, "vote": _vote, "redux": _reduce,
    "griddepcontrol": _other_kernels, "setmaxnreg": _nothing, "prefetch": _nothing, "createpolicy": _nothing,
    "fence": _nothing, "membar": _nothing,
}  # fmt: skip
