"""Between host and device without waiting: arrays there, one copy per dtype, and tensors back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
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


@cache
def _to_host(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to the host: what is computed next need not wait for them."""
    return torch.cuda.Stream(device)


class Fetch:
    """Tensors on their way to the host: `take` them, `sent` ends the list, `wait` before they are read."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _to_host(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """The host's copy of `tensor`, which nothing may write any more, filled when `wait` returns; on a CPU
        the tensor itself."""
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host

    def sent(self) -> None:
        """Nothing more is taken; `wait` waits for all that the device has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, others get the GIL
            self._event.record(self._stream)

    def wait(self) -> None:
        """Until everything has arrived."""
        if self._event is not None:
            self._event.synchronize()
