"""`expect`: one call that checks a tensor against the shape string its docstring gives; and how errors name
many things. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol


class TensorLike(Protocol):
    """What `expect` reads of a tensor."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


def expect(
    tensor: TensorLike, shape: str | None, dtype: Any = None, name: str = "tensor", **sizes: int
) -> dict[str, int]:
    """Check `tensor` against e.g. "B Hq D" or "N 4"; returns the sizes bound to the letters.

    A number, or a letter given in `sizes`, must match; a new letter binds. None: any shape. `dtype` is one
    dtype or a tuple of them. Raises ValueError naming the tensor, what came and what was wanted.
    """
    bound, got = dict(sizes), tensor.shape
    if shape is not None:
        wanted = _letters(shape)
        good = len(wanted) == len(got)
        for letter, size in zip(wanted, got, strict=False):
            good &= size == (bound.setdefault(letter, size) if isinstance(letter, str) else letter)
        if not good:
            known = ", ".join(f"{k}={v}" for k, v in sizes.items())
            given = f" with {known}" if known else ""
            raise ValueError(f"{name}: shape {[int(n) for n in got]}, wanted [{shape}]{given}")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if dtype is not None and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype}, wanted {' or '.join(map(str, dtypes))}")
    return bound


@cache
def _letters(shape: str) -> tuple[str | int, ...]:
    """What "B 4 D" wants of each dimension: a letter, or a number."""
    return tuple(int(word) if word.isdigit() else word for word in shape.split())


def first_few(names: Sequence[str], most: int = 4) -> str:
    """Names for a message: the first ones, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
