"""Say how numpy holds the values of registers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
REGISTERS = {
    "p": bool,
    "rs": np.uint16,
    "r": np.uint32,
    "rd": np.uint64,
}  # by the letters of a register's name
LANE = np.arange(32)
SHARED_BASE = 1024  # address at which a program's shared memory begins
Lanes = np.ndarray  # int64: indices of threads in the grid
Work = Callable[[Lanes], None]
Read = Callable[[Lanes], np.ndarray]


class Fault(Exception):
    """Report something that a GPU would not do, or would do wrong."""


def bits_of(kind: str) -> int:
    """Return the width of an operand of this type: b32, u8, s64, f32, bf16, f16x2, ..."""
    return int("".join(re.findall(r"\d+", kind)[:1])) * (2 if kind.endswith("x2") else 1)


@cache  # every operand of every launch calls it
def dtype_of(kind: str) -> np.dtype[Any]:
    """Return the dtype of an operand of this type. 16-bit floats are held as their bits."""
    if kind == "pred":
        return np.dtype(bool)
    if kind in ("f32", "f64"):
        return np.dtype(f"f{bits_of(kind) // 8}")
    return np.dtype((_SIGNED if kind[0] == "s" else UNSIGNED)[bits_of(kind)])


def is_half(kind: str) -> bool:
    """Return whether values of this type are 16-bit floats, one or two of them."""
    return kind.removeprefix("b") in ("f16", "f16x2")


def dense(values: np.ndarray) -> np.ndarray:
    """Return the values in one contiguous piece, so that they can be viewed as another type."""
    return np.ascontiguousarray(values)


def from_half(kind: str, bits: np.ndarray) -> np.ndarray:
    """Return the fp32 values of 16-bit floats."""
    if kind.startswith("b"):
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def to_half(kind: str, x: np.ndarray) -> np.ndarray:
    """Return the 16-bit floats nearest to fp32 or fp64 values, ties to even."""
    if not kind.startswith("b"):
        return x.astype(np.float16).view(np.uint16)
    bits = dense(x.astype(np.float32)).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def elements(words: np.ndarray, kind: str) -> np.ndarray:
    """Return the int8 or fp32 values that 32-bit words hold, along the last axis."""
    words = dense(words)
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)
    if kind in ("s8", "u8"):
        return words.view(np.int8 if kind == "s8" else np.uint8)
    if not is_half(kind):
        raise NotImplementedError(kind)
    return from_half(kind, words.view(np.uint16))


def whole_warps(lanes: Lanes) -> Lanes:
    """Return `lanes`, after checking that they are whole warps."""
    first = lanes[::32]
    if len(lanes) % 32 or (first % 32).any() or (lanes[31::32] - first != 31).any():
        raise Fault("not all threads of a warp are here")
    return lanes
