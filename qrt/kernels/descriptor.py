"""TMA descriptors: what the bulk copy engine of a Hopper GPU brings from a tensor, as `launch` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MOST_KEPT = 1 << 14  # descriptors, half a kilobyte each: of all weights, and of the places activations have


class Box:
    """A block of a tensor that is copied at a time, and how it lies in shared memory.

    Kernels are compiled for it: `box` returns one object of each kind.
    """

    __slots__ = ("_encoding", "block", "dtype", "layout")

    def __init__(self, dtype: torch.dtype, block: tuple[int, ...], layout: gl.NVMMASharedLayout) -> None:
        self.dtype = dtype
        self.block = block
        self.layout = layout
        self._encoding: dict[str, Any] | None = None  # as the compiler wants it

    def has(self, encoding: dict[str, Any] | None) -> bool:
        """Take what a compiled kernel says of its descriptors; False if another one said otherwise."""
        if self._encoding is None:
            self._encoding = encoding
        return encoding is not None and self._encoding == encoding

    def encode(self, descriptor: TensorDescriptor) -> list[Any] | None:
        """What CUDA takes for a descriptor; None before a kernel with such boxes was compiled."""
        return None if self._encoding is None else make_tensordesc_arg(descriptor, self._encoding)


@cache
def box(dtype: torch.dtype, block: tuple[int, ...], layout: gl.NVMMASharedLayout) -> Box:
    """Return the one `Box` of its kind."""
    return Box(dtype, block, layout)


class _Place(NamedTuple):
    """As much of a tensor as Triton asks a descriptor's for, without keeping its memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Descriptor:
    """A TMA descriptor: elements of `box.dtype` from an address on, by shape and strides."""

    __slots__ = ("_values", "box", "device", "for_triton")

    def __init__(
        self, box: Box, device: int, address: int, shape: Sequence[int], strides: Sequence[int]
    ) -> None:
        self.box = box
        self.device = device
        place = _Place(address, box.dtype)
        self.for_triton = TensorDescriptor(place, list(shape), list(strides), list(box.block), box.layout)
        self._values: list[Any] | None = None

    @property
    def values(self) -> list[Any]:
        """What CUDA takes: 128 bytes, then shape and strides. Empty before a kernel was compiled for it."""
        if self._values is None:
            self._values = self.box.encode(self.for_triton)
        return self._values or []


# By address, not by tensor: whatever lies there in this shape has the same descriptor.
descriptor_at = lru_cache(maxsize=MOST_KEPT)(Descriptor)


def descriptor_of(x: Tensor, box: Box) -> Descriptor:
    """Return the descriptor of all of x, a tensor of the box's dtype."""
    return descriptor_at(box, x.get_device(), x.data_ptr(), x.shape, x.stride())
