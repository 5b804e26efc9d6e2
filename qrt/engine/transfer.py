"""Between host and device without waiting: arrays there, one copy per dtype, and tensors back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN_BYTES = 64  # pointers of equal alignment: Triton compiles one variant, and it loads wide


def to_device(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Each array as a tensor of its shape on `device`. All arrays of one dtype travel together through one
    pinned buffer, without waiting for the device; the buffer is not reused before the copy is done (torch's
    host allocator sees to that)."""
    groups: dict[np.dtype[Any], list[str]] = {}
    for name, array in arrays.items():
        groups.setdefault(array.dtype, []).append(name)
    tensors: dict[str, Tensor] = {}
    for dtype, names in groups.items():
        step = _ALIGN_BYTES // dtype.itemsize
        starts, total = [], 0
        for name in names:
            starts.append(total)
            total += -(-arrays[name].size // step) * step
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        host = torch.empty(total, dtype=kind, pin_memory=device.type == "cuda")
        view = host.numpy()
        for name, start in zip(names, starts, strict=True):
            view[start : start + arrays[name].size] = arrays[name].reshape(-1)
        there = host.to(device, non_blocking=True)
        for name, start in zip(names, starts, strict=True):
            shape = arrays[name].shape
            tensors[name] = there[start : start + arrays[name].size].view(shape)
    return tensors


class Fetch:
    """Tensors on their way to the host: `take` them, `sent` ends the list, `wait` before they are read."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._event: torch.cuda.Event | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """The host's copy of `tensor`, filled when `wait` returns; on a CPU the tensor itself."""
        if not self._pinned:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def sent(self) -> None:
        """Nothing more is taken."""
        if self._pinned:
            self._event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, others get the GIL
            self._event.record()

    def wait(self) -> None:
        """Until everything has arrived."""
        if self._event is not None:
            self._event.synchronize()
