"""Run a launch: its threads, their registers, and whose turn it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ptx import arithmetic
from ptx.deferred import Deferred
from ptx.races import Races
from ptx.tensors import Descriptor, Tensors
from ptx.text import Code, Instruction, groups
from ptx.values import LANE, REGISTERS, SHARED_BASE, UNSIGNED, Fault, Lanes, Read, Work, dtype_of

PARAMETERS, PARAMETER = 1 << 46, 256  # address of the first parameter, and the distance between two
_IDLE_TURNS = 256  # after which a copy arrives, if programs ask for it again and again
_ENDS = ("bra", "brx", "ret", "exit", "bar", "barrier", "mbarrier", "cp")  # they end a turn


@dataclass(frozen=True)
class Order:
    """In which order what runs at the same time happens.

    copies       arrive "late", when nothing else can continue, or "early", when they are asked for; then
                 warps that have asked for copies run before all others
    overlaps     the kernel starts before the one before is done, and has to wait for that itself
    seed         makes warps take turns at random and copies arrive at random; without a seed, warps at one
                 place run together
    """

    copies: str = "late"
    overlaps: bool = False
    seed: int | None = None


@dataclass
class Barrier:
    """Hold an mbarrier.

    count           arrivals of a phase
    pending         arrivals that are missing
    known           what those who have arrived knew (see `Races`)
    missing_bytes   bytes that have not come yet
    phase           phases that are over
    """

    count: int
    pending: int
    known: np.ndarray
    missing_bytes: int = 0
    phase: int = 0


LATE = Order()
Operation = Callable[["Grid", Instruction], Work]


class Grid:
    """Run all programs of a launch side by side, as if all of them fitted at once.

    operations   what each instruction does that is no arithmetic, by its name
    parameters   what the kernel is given: int, float or Descriptor each
    shared       bytes of a program's shared memory
    """

    def __init__(
        self, code: Code, operations: Mapping[str, Operation], shape: Sequence[int],
        parameters: Sequence[int | float | Descriptor], tensors: Tensors, shared: int, order: Order = LATE,
    ) -> None:  # fmt: skip
        self._operations = operations
        self.code, self.tensors, self.shape = code, tensors, (*shape, 1, 1)[:3]
        self.threads, programs = code.threads, int(np.prod(shape))
        self.lanes = programs * self.threads
        self.program = np.arange(self.lanes) // self.threads
        self.parameters = dict(zip(code.parameters, parameters, strict=True))
        self.shared_bytes = SHARED_BASE + shared
        self.shared = np.full(programs * self.shared_bytes, 0xFF, np.uint8)
        self.races = Races(programs, self.threads // 32, self.shared_bytes)
        self.races.knows[:, -1] = not order.overlaps
        self.registers: dict[str, np.ndarray] = {}
        self.pc, warps = np.zeros(self.lanes, np.int32), self.lanes // 32
        self.done, self.blocked = np.zeros(warps, bool), np.zeros(warps, bool)
        self.barriers: dict[tuple[int, int], Barrier] = {}  # mbarriers by program and address
        self.met: dict[tuple[int, int], list[int]] = {}  # warps by program and number of a barrier
        self.copies: list[Callable[[], None]] = []  # what delivers each
        self.fetchers = np.zeros(warps, bool)  # warps that have asked for copies
        self.hasty = np.zeros(programs, bool)  # programs that let the next kernel start before they waited
        self._early = order.copies == "early"
        self.products, self.fetches = Deferred(self.lanes), Deferred(self.lanes)
        self.random = None if order.seed is None else np.random.default_rng(order.seed)
        self._waiting: dict[tuple, list[int]] = {}  # warps, by the key they wait for
        self._last_turn, self._turns = np.zeros(warps, np.int64), 0
        self._steps = [self._compile(i) for i in code.instructions]
        self._stops = np.zeros(len(self._steps) + 1, bool)
        self._stops[list(code.labels.values())] = True
        for at, i in enumerate(code.instructions):
            self._stops[at] |= "try_wait" in i.opcode
            self._stops[at + 1] |= i.opcode[0] in _ENDS

    def run(self) -> None:
        """Run until every thread is done. A note of an exception holds the instruction that failed."""
        with np.errstate(all="ignore"):
            while not self.done.all():
                ready = np.flatnonzero(~self.done & ~self.blocked)
                self._turns += 1
                if self.copies and (len(ready) == 0 or self._copy_is_due()):
                    which = 0 if self.random is None else int(self.random.integers(len(self.copies)))
                    self.copies.pop(which)()
                elif len(ready):
                    first = ready[self.fetchers[ready]] if self._early else ready
                    self._turn(first if len(first) else ready)
                else:
                    self._deadlock()
        if not self.races.knows[:, -1].any():
            raise Fault(
                "no thread waits for the kernel before, so waiting for this kernel does not cover that one"
            )

    def is_fence(self) -> bool:
        """Return whether the kernel before is done when the next one starts.

        It is if some program waits for it before it lets the next one start, or before it ends.
        """
        waits = self.races.knows[:, -1].reshape(len(self.hasty), -1).any(1)
        return bool((waits & ~self.hasty).any())

    def _copy_is_due(self) -> bool:
        if self.random is None:
            return self._early or self._turns % _IDLE_TURNS == 0
        return self.random.random() < 0.3

    def _turn(self, ready: np.ndarray) -> None:
        """Run some warps up to a place where others may join them, or where they may have to wait."""
        lowest = self.pc.reshape(-1, 32)[ready].min(1)  # threads that are behind in their warp go first
        pick = self._last_turn[ready].argmin() if self.random is None else self.random.integers(len(ready))
        pc = int(lowest[pick])
        warps = ready[lowest == pc] if self.random is None else ready[pick : pick + 1]
        self._last_turn[warps] = self._turns
        lanes = (warps[:, None] * 32 + LANE).reshape(-1)
        lanes = lanes[self.pc[lanes] == pc]
        while True:
            self.pc[lanes] = pc + 1
            try:
                self._steps[pc](lanes)
            except Exception as error:
                error.add_note(self.code.instructions[pc].text)
                raise
            pc += 1
            if self._stops[pc]:
                return

    def wait(self, key: tuple, warp: int) -> None:
        """Block a warp until somebody wakes `key`."""
        self.blocked[warp] = True
        self._waiting.setdefault(key, []).append(warp)

    def wake(self, key: tuple) -> list[int]:
        """Let the warps that wait for `key` continue, and return them."""
        warps = self._waiting.pop(key, [])
        self.blocked[warps] = False
        return warps

    def _deadlock(self) -> None:
        waits = [f"{len(warps)} warps for {' '.join(map(str, key))}" for key, warps in self._waiting.items()]
        raise Fault("deadlock: " + ", ".join(waits))

    # Operands, read and written per lane.

    def register(self, name: str) -> np.ndarray:
        """Return the values of a register, one per lane."""
        if name not in self.registers:
            letters = groups(r"%([a-z]+)(?=[\d@])", name).group(1)
            self.registers[name] = np.zeros(self.lanes, REGISTERS[letters])
        return self.registers[name]

    def reader(self, operand: str, kind: str) -> Read:
        """Return a function from lanes to the operand's values, as `kind`."""
        dtype = dtype_of(kind)
        if operand.startswith("!"):
            inner = self.reader(operand[1:], kind)
            return lambda lanes: ~inner(lanes)
        if special := re.fullmatch(r"%(tid|ctaid|nctaid|laneid|globaltimer)(?:\.([xyz]))?", operand):
            return self._special(special[1], special[2] or "x", dtype)
        if operand.startswith("%"):
            array = self.register(operand)
            if array.dtype.itemsize == dtype.itemsize:
                return lambda lanes: array[lanes].view(dtype)
            bits = UNSIGNED[8 * min(dtype.itemsize, array.dtype.itemsize)]
            return lambda lanes: array[lanes].astype(bits).astype(UNSIGNED[8 * dtype.itemsize]).view(dtype)
        value, width = self.constant(operand), 8 * dtype.itemsize
        constant = np.array(value % (1 << width), UNSIGNED[width]).view(dtype)
        if kind == "pred":
            constant = np.array(value != 0)
        return lambda lanes: np.full(len(lanes), constant, dtype)

    def _special(self, name: str, axis: str, dtype: np.dtype) -> Read:
        if name == "laneid":
            return lambda lanes: (lanes % 32).astype(dtype)
        if name == "globaltimer":  # a turn takes a nanosecond
            return lambda lanes: np.full(len(lanes), self._turns, dtype)
        d = "xyz".index(axis)
        if name == "nctaid":
            return lambda lanes: np.full(len(lanes), self.shape[d], dtype)
        if name == "ctaid":
            below = int(np.prod(self.shape[:d]))
            return lambda lanes: (self.program[lanes] // below % self.shape[d]).astype(dtype)
        return lambda lanes: (lanes % self.threads if d == 0 else np.zeros(len(lanes))).astype(dtype)

    def constant(self, operand: str) -> int:
        """Return the bits of a number, or an address of shared memory or of a parameter."""
        if operand[:2] in ("0f", "0d"):
            return int(operand[2:], 16)
        name, _, offset = operand.partition("+")
        if name == "global_smem":
            return SHARED_BASE + int(offset or 0)
        if name in self.parameters:
            return PARAMETERS + PARAMETER * self.code.parameters.index(name) + int(offset or 0)
        return int(operand.rstrip("U"), 0)

    def parameter(self, address: int) -> int | float | Descriptor:
        """Return the parameter at this address."""
        return self.parameters[self.code.parameters[(address - PARAMETERS) // PARAMETER]]

    def writer(self, operand: str):
        """Return a function that writes values to the operand for some lanes.

        Values narrower than the register are extended, by their sign if they have one.
        """
        if operand == "_":
            return lambda lanes, values: None
        array = self.register(operand)

        def write(lanes: Lanes, values: np.ndarray) -> None:
            if values.dtype.itemsize != array.dtype.itemsize:
                values = values.astype(array.dtype)
            array[lanes] = values.view(array.dtype)

        return write

    def addresses(self, operand: str) -> Read:
        """Return a function from lanes to int64 addresses of [register + offset] or [symbol + offset]."""
        base, offset = groups(r"\[\s*([^+\s\]]+?)\s*(?:\+\s*(-?\d+))?\s*\]$", operand).groups()
        if base.startswith("%"):
            read = self.reader(base, "s64" if base.startswith("%rd") else "u32")
            return lambda lanes: read(lanes).astype(np.int64) + int(offset or 0)
        constant = self.constant(base) + int(offset or 0)
        return lambda lanes: np.full(len(lanes), constant, np.int64)

    def _compile(self, i: Instruction) -> Work:
        name = i.opcode[0]
        if name in self._operations:
            work = self._operations[name](self, i)
        elif name in arithmetic.OPERATIONS:
            compute, kinds = arithmetic.OPERATIONS[name](i.opcode)
            write = self.writer(i.operands[0].split("|")[0])
            reads = [self.reader(o, k) for o, k in zip(i.operands[1:], kinds, strict=True)]

            def work(lanes: Lanes) -> None:
                write(lanes, compute(*[read(lanes) for read in reads]))
        else:
            raise NotImplementedError(i.text)
        if i.guard is None:
            return work
        flag, wanted = self.register(i.guard[0]), i.guard[1]

        def guarded(lanes: Lanes) -> None:
            chosen = lanes[flag[lanes] == wanted]
            if len(chosen):
                work(chosen)

        return guarded
