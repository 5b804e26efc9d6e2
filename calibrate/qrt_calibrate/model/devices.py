"""The devices that --device names, and work on several of them at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import nn

from qrt.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")


def devices_of(name: str | torch.device | None) -> list[torch.device]:
    """Return the devices of --device.

    "cuda" names all CUDA devices; so does None if there are any, else it names the CPU. Commas separate
    several devices of one kind. The first device does the work that is not divided.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        name = "cuda" if count else "cpu"
    name = str(name)
    if name == "cuda" and count > 1:
        return [torch.device("cuda", index) for index in range(count)]
    try:
        devices = [torch.device(part.strip()) for part in name.split(",")]
    except RuntimeError:
        devices = []
    if not devices or any(device.type not in ("cpu", "cuda") for device in devices):
        raise ConfigError(f"--device: expected e.g. cuda, cuda:1, cuda:0,cuda:2 or cpu, got {name!r}")
    if len({device.type for device in devices}) > 1:
        raise ConfigError(f"--device: expected devices of one kind, got {name!r}")
    if devices[0].type == "cuda" and max(device.index or 0 for device in devices) >= count:
        there = f"cuda:0 to cuda:{count - 1}, or cpu" if count > 1 else "cuda:0 or cpu" if count else "cpu"
        raise ConfigError(f"--device: expected {there}, which is what this machine has, got {name!r}")
    return devices


def replica(layer: nn.Module, device: torch.device) -> nn.Module:
    """Copy `layer` to `device`, hooks included; on its own device the two share their tensors."""
    tensors: dict[int, object] = {
        id(own): nn.Parameter(own.to(device), requires_grad=False) for own in layer.parameters()
    }
    tensors |= {id(own): own.to(device) for own in layer.buffers()}
    return copy.deepcopy(layer, tensors)


def at_once(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call `work` on every item, each in a thread of its own; a single item runs in this thread."""
    if len(items) == 1:
        return [work(items[0])]
    gradients = torch.is_grad_enabled()  # every thread begins with a setting of its own

    def call(item: Item) -> Result:
        with torch.set_grad_enabled(gradients):
            return work(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(call, items))
