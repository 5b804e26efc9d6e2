"""`expect`: one call that checks a tensor against the shape string its docstring gives. Torch-free."""

from __future__ import annotations

from typing import Any, Protocol


class TensorLike(Protocol):
    """What `expect` reads of a tensor."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


def expect(
    tensor: TensorLike, shape: str, dtype: Any = None, name: str = "tensor", **sizes: int
) -> dict[str, int]:
    """Check `tensor` against e.g. "B Hq D" or "T 2*I"; returns the sizes bound to the letters.

    A letter given in `sizes`, a number, or `2*I` with a known I must match; a new letter binds;
    "..." at the front matches any leading dimensions. `dtype` is one dtype or a tuple of them.
    Raises ValueError naming the tensor, what came and what was wanted.
    """
    wanted, got = shape.split(), tuple(int(n) for n in tensor.shape)
    tail = got
    if wanted and wanted[0] == "...":
        wanted = wanted[1:]
        tail = got[max(0, len(got) - len(wanted)) :]
    bound = dict(sizes)
    good = len(wanted) == len(tail)
    for symbol, size in zip(wanted, tail, strict=False):
        factor, _, letter = symbol.rpartition("*")
        if letter.isdigit():
            good &= int(letter) == size
        elif letter in bound:
            good &= int(factor or 1) * bound[letter] == size
        else:
            good &= size % int(factor or 1) == 0
            bound[letter] = size // int(factor or 1)
    if not good:
        known = ", ".join(f"{k}={v}" for k, v in sizes.items())
        raise ValueError(f"{name}: shape {list(got)}, wanted [{shape}]" + (f" with {known}" if known else ""))
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if dtype is not None and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype}, wanted {' or '.join(map(str, dtypes))}")
    return bound
