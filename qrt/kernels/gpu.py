"""What a device is, as launchers ask: torch only, so that the host side of an operator may ask too."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

_HOPPER_SHARED_BYTES = 227 << 10


def launches_on(device: torch.device) -> torch.cuda.device:
    """Within it kernels are launched on this GPU: Triton and graphs take the thread's current one, wherever
    their tensors are. Of a CPU nothing."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _is_recording(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Record what is within it on a second stream of a CUDA graph, beside what follows up to `together`.

    Outside of a recording it changes nothing: there the host is what steps wait for."""
    if not _is_recording(device):
        yield
        return
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def together(device: torch.device) -> None:
    """Let what follows wait for what was recorded `aside`."""
    if _is_recording(device):
        torch.cuda.current_stream(device).wait_stream(_side_stream(device))


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 of a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=8)
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have; on a CPU, a Hopper GPU's."""
    if device.type != "cuda":
        return _HOPPER_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Whether the device has wgmma."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one it follows is done (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
