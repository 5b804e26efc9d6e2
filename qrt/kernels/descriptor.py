"""TMA descriptors, as `launch` takes them: how a tensor lies in memory, for a Hopper GPU's copy engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MOST_KEPT = 1 << 14  # descriptors, half a kilobyte each: of all weights, and of all addresses of activations


class Box:
    """The block of a tensor that is copied at a time, and its layout in shared memory.

    Kernels are compiled for it. `box` returns the same object for the same values.
    """

    __slots__ = ("_encoding", "block", "dtype", "layout")

    def __init__(self, dtype: torch.dtype, block: tuple[int, ...], layout: gl.NVMMASharedLayout) -> None:
        self.dtype = dtype
        self.block = block
        self.layout = layout
        self._encoding: dict[str, Any] | None = None  # as the compiler wants it

    def has(self, encoding: dict[str, Any] | None) -> bool:
        """Remember a compiled kernel's encoding; return False if an earlier kernel had a different one."""
        if self._encoding is None:
            self._encoding = encoding
        return encoding is not None and self._encoding == encoding

    def encode(self, descriptor: TensorDescriptor) -> list[Any] | None:
        """Return what CUDA takes for a descriptor; None before a kernel with this box is compiled."""
        return None if self._encoding is None else make_tensordesc_arg(descriptor, self._encoding)


@cache
def box(dtype: torch.dtype, block: tuple[int, ...], layout: gl.NVMMASharedLayout) -> Box:
    """Return the one `Box` with these values."""
    return Box(dtype, block, layout)


class _Place(NamedTuple):
    """The two things Triton asks of a descriptor's tensor. Does not keep the tensor's memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Descriptor:
    """A TMA descriptor of the elements of `box.dtype` at an address, with a shape and strides."""

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
        """Return what CUDA takes: 128 bytes, shape, strides. Empty before a kernel is compiled for it."""
        if self._values is None:
            self._values = self.box.encode(self.for_triton)
        return self._values or []


# Keyed by address, not by tensor: any tensor of this shape at this address has the same descriptor.
descriptor_at = lru_cache(maxsize=MOST_KEPT)(Descriptor)


def descriptor_of(x: Tensor, box: Box) -> Descriptor:
    """Return the descriptor of the whole tensor x, whose dtype is the box's."""
    return descriptor_at(box, x.get_device(), x.data_ptr(), x.shape, x.stride())
