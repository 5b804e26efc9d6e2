"""Hold what a kernel may touch: the tensors that it is given, and boxes of them for the copy engine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ptx.values import Fault


def _bytes_at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


class Tensors:
    """Hold what a kernel may touch: the tensors that it is given, by address.

    before    bytes of a tensor (its begin and end) that kernels before have written, which may still run
    written   bytes that this kernel has written
    """

    def __init__(self, before: dict[tuple[int, int], np.ndarray] | None = None) -> None:
        self._known: dict[tuple[int, int], tuple[str, np.ndarray]] = {}
        self._places: list[tuple[int, int]] = []
        self.before = before or {}
        self.written: dict[tuple[int, int], np.ndarray] = {}

    def add(self, address: int, count: int, name: str) -> None:
        """Add a tensor of `count` bytes."""
        if count:
            self.add_place(address, count)
            self._known.setdefault((address, address + count), (name, _bytes_at(address, count)))

    def add_place(self, address: int, count: int) -> None:
        """Add `count` bytes that only the copy engine reads."""
        self._places.append((address, address + count))

    def follow(self, written: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]) -> None:
        """Take over what kernels before have `left`.

        A byte that has changed since was written by an operator of torch, which waits for all kernels before.
        """
        for (first, last), (there, data) in written.items():
            for begin, end in self._places:
                begin, end = max(begin, first), min(end, last)
                part = slice(begin - first, max(end, begin) - first)
                mine = there[part]
                if mine.any() and (_bytes_at(begin, len(mine))[mine] == data[part][mine]).all():
                    self.before[begin, end] = mine | self.before.get((begin, end), False)

    def left(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        """Return the bytes written so far, by kernels before too, and the tensors' current values."""
        masks = dict(self.before)
        for place, there in self.written.items():
            masks[place] = there | masks.get(place, False)
        return {place: (there, _bytes_at(place[0], len(there)).copy()) for place, there in masks.items()}

    def find(
        self, address: np.ndarray, count: int, write: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield, per tensor, the indices of the addresses inside it, its bytes, and their places in it."""
        left = np.ones(len(address), bool)
        for (begin, end), (_, data) in self._known.items():
            here = left & (address >= begin) & (address + count <= end)
            if here.any():
                left &= ~here
                place = (address[here] - begin)[:, None] + np.arange(count)
                if write:
                    self.written.setdefault((begin, end), np.zeros(end - begin, bool))[place] = True
                yield np.flatnonzero(here), data, place
        if left.any():
            known = ", ".join(f"{name} {a:#x} to {b:#x}" for (a, b), (name, _) in self._known.items())
            raise Fault(f"{count} bytes at {int(address[left][0]):#x}, in none of {known}")


@dataclass
class Descriptor:
    """Hold a tensor for the copy engine: strides and swizzle in bytes, the innermost dimension last."""

    address: int
    shape: list[int]
    strides: list[int]
    box: list[int]
    item_bytes: int
    swizzle: int

    def read(self, first: list[int]) -> np.ndarray:
        """Return the box at `first` as uint8, zero outside the tensor."""
        extent = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.item_bytes
        inside, offset = np.ones(1, bool), np.zeros(1, np.int64)
        for d, (n, stride, box) in enumerate(zip(self.shape, self.strides, self.box, strict=True)):
            at = (first[d] + np.arange(box)).reshape([-1] + [1] * (len(self.box) - 1 - d))
            inside = inside & (at >= 0) & (at < n)
            offset = offset + at * stride
        offset = np.where(inside, offset, 0).reshape(-1, 1) + np.arange(self.item_bytes)
        return np.where(inside.reshape(-1, 1), _bytes_at(self.address, extent)[offset], 0).reshape(-1)


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """Return where the byte of this shared address is stored: bits 4.. are XORed with its bits 7..."""
    return address ^ (((address >> 7) & {0: 0, 32: 1, 64: 3, 128: 7}[width]) << 4)
