"""Copy arrays to the device, one copy per dtype, and tensors back to the host, without waiting."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN_BYTES = 64  # with equal alignment Triton compiles one variant, with wide loads


def to_device(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Copy each array to a tensor of its shape on `device`, without waiting for the device.

    All arrays of one dtype share one pinned buffer and one copy. Torch's host allocator does not reuse the
    buffer before the copy is done.
    """
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
    """Return the stream of copies to the host, so that later computation need not wait for them."""
    return torch.cuda.Stream(device)


class Fetch:
    """Copies tensors to the host: `take` each, call `sent` after the last, `wait` before reading them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _to_host(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """Return the host's copy of `tensor`, which is complete when `wait` returns.

        Nothing may write the tensor afterwards. On a CPU the tensor itself is returned.
        """
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host

    def sent(self) -> None:
        """End the list of tensors; `wait` then waits for all work that the device has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps without the GIL
            self._event.record(self._stream)

    def wait(self) -> None:
        """Wait until everything has arrived."""
        if self._event is not None:
            self._event.synchronize()
