"""What launchers ask about a device. Imports torch only, so that an operator's host side can ask too."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

_HOPPER_SHARED_BYTES = 227 << 10


def launches_on(device: torch.device) -> torch.cuda.device:
    """Launch kernels and graphs on `device` within this context. Do nothing on a CPU.

    Triton and CUDA graphs otherwise use the thread's current GPU, wherever the tensors are.
    """
    return torch.cuda.device(device if device.type == "cuda" else -1)


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _is_recording(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Record this context on a second stream of a CUDA graph, beside what follows up to `together`.

    Without a recording it changes nothing: the host is then the bottleneck, not the GPU.
    """
    if not _is_recording(device):
        yield
        return
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def together(device: torch.device) -> None:
    """Make what follows wait for what was recorded `aside`."""
    if _is_recording(device):
        torch.cuda.current_stream(device).wait_stream(_side_stream(device))


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=8)
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have; for a CPU, those of a Hopper GPU."""
    if device.type != "cuda":
        return _HOPPER_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Return whether the device is a Hopper GPU, which has wgmma."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def overlaps(device: torch.device) -> bool:
    """Return whether a kernel may start before the previous one ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
