"""Check tensors against shapes (`expect`), and settings against their ranges. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeGuard

from qrt.errors import ConfigError

LARGEST = 2**63 - 1  # largest integer that tensors and messages between processes hold


class TensorLike(Protocol):
    """The part of a tensor that `expect` reads."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


def expect(
    tensor: TensorLike, shape: str | None, dtype: Any = None, name: str = "tensor", **sizes: int
) -> Mapping[str, int]:
    """Check `tensor` against a shape such as "B Hq D", "N 4" or "N K*4/32"; return the sizes of the letters.

    A number, or a letter given in `sizes`, must match; a new letter takes the tensor's size. Of a letter with
    factors there are as many as fit (`Dimension`). None allows any shape. `dtype` is one dtype or a tuple of
    them. Raises ValueError with the tensor's name, what was expected and what came.
    """
    bound = {} if shape is None else _bind(shape, tuple(tensor.shape), tuple(sizes.items()))
    if bound is None:
        known = ", ".join(f"{k}={v}" for k, v in sizes.items())
        given = f" with {known}" if known else ""
        raise ValueError(f"{name}: expected shape [{shape}]{given}, got {[int(n) for n in tensor.shape]}")
    if dtype is not None and tensor.dtype is not dtype:
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    return bound


class Dimension(NamedTuple):
    """A dimension of a shape string, such as "K*4/32": words of 32 bits that hold K codes of 4.

    letter   what it counts
    times    bits, or whatever, of each
    over     how many of those are one element; the last may be filled in part
    """

    letter: str
    times: int = 1
    over: int = 1

    def of(self, size: int) -> int:
        """Return the elements for `size` of the letter."""
        return -(-size * self.times // self.over)


@lru_cache(maxsize=1 << 10)
def dimension(word: str) -> Dimension:
    """Read one dimension of a shape string."""
    letter, times, over = re.fullmatch(r"(\w+)(?:\*(\d+))?(?:/(\d+))?", word).groups()  # type: ignore[union-attr]
    return Dimension(letter, int(times or 1), int(over or 1))


@lru_cache(maxsize=1 << 12)
def _bind(shape: str, got: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> Mapping[str, int] | None:
    """Return the sizes of the letters of a shape string; None if the shape does not fit."""
    wanted, bound = shape.split(), dict(sizes)
    good = len(wanted) == len(got)
    for own, size in zip(map(dimension, wanted), got, strict=False):
        if not own.letter.isdigit():
            good &= size == own.of(bound.setdefault(own.letter, size * own.over // own.times))
        else:
            good &= size == int(own.letter)
    return MappingProxyType(bound) if good else None


def first_few(names: Sequence[str], most: int = 4) -> str:
    """List names for a message: the first ones, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether `value` is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is an int or a float; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def at_least(name: str, value: object, low: int) -> None:
    """Raise ConfigError unless `value` is an integer from `low` to LARGEST."""
    if not is_integer(value) or value < low:
        raise ConfigError(f"{name}: expected an integer of at least {low}, got {value!r}")
    at_most(name, value, LARGEST)


def check_seed(value: object) -> None:
    """Raise ConfigError unless `value` is an integer of 64 bits."""
    if not is_integer(value) or not -LARGEST - 1 <= value <= LARGEST:
        raise ConfigError(f"seed: expected an integer of 64 bits, got {value!r}")


def at_most(name: str, value: int, high: int) -> None:
    """Raise ConfigError for a `value` above `high`."""
    if value > high:
        raise ConfigError(f"{name}: expected at most {high}, got {value}")


def between(name: str, value: object, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a number from `low` to `high`."""
    if not is_number(value) or not low <= value <= high:
        raise ConfigError(f"{name}: expected {low} to {high}, got {value!r}")


def yes_or_no(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is True, False, 1 or 0; a text such as "false" is none of them."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(f"{name}: expected True or False, got {value!r}")


def listed(name: str, value: object) -> tuple[Any, ...]:
    """Return a list as a tuple of plain values; ConfigError for anything else, such as a text."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}: expected a list, got {value!r}")
    return tuple(map(plain, value))


def plain(value: Any) -> Any:
    """Return a number or array of numpy or torch as a Python number or list."""
    return value.tolist() if hasattr(value, "tolist") else value


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `known`."""
    if value not in known:
        raise ConfigError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
