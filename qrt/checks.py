"""`expect`: one call that checks a tensor against the shape string its docstring gives; and how errors name
many things. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol


class TensorLike(Protocol):
    """What `expect` reads of a tensor."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


def expect(
    tensor: TensorLike, shape: str | None, dtype: Any = None, name: str = "tensor", **sizes: int
) -> Mapping[str, int]:
    """Check `tensor` against e.g. "B Hq D" or "N 4"; returns the sizes bound to the letters.

    A number, or a letter given in `sizes`, must match; a new letter binds. None: any shape. `dtype` is one
    dtype or a tuple of them. Raises ValueError naming the tensor, what came and what was wanted.
    """
    bound = {} if shape is None else _bind(shape, tuple(tensor.shape), tuple(sizes.items()))
    if bound is None:
        known = ", ".join(f"{k}={v}" for k, v in sizes.items())
        given = f" with {known}" if known else ""
        raise ValueError(f"{name}: shape {[int(n) for n in tensor.shape]}, wanted [{shape}]{given}")
    if dtype is not None and tensor.dtype is not dtype:
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name}: dtype {tensor.dtype}, wanted {' or '.join(map(str, dtypes))}")
    return bound


@lru_cache(maxsize=1 << 12)
def _bind(shape: str, got: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> Mapping[str, int] | None:
    """The sizes bound to the letters of a shape string; None where it does not fit."""
    wanted, bound = shape.split(), dict(sizes)
    good = len(wanted) == len(got)
    for letter, size in zip(wanted, got, strict=False):
        good &= size == (int(letter) if letter.isdigit() else bound.setdefault(letter, size))
    return MappingProxyType(bound) if good else None


def first_few(names: Sequence[str], most: int = 4) -> str:
    """Names for a message: the first ones, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
