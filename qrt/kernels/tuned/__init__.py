"""Block sizes that `qrt-eval kernels --tune` found, one JSON file a GPU; nothing is tuned while serving."""

from __future__ import annotations

import json
import logging
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
Measured = list[Any]  # the name of a kernel's plan, and its numbers


def path(device_name: str) -> Path:
    """The file of a GPU by the name CUDA gives it: `NVIDIA H200` -> nvidia_h200.json."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".json")


@lru_cache(maxsize=8)
def configs(device: torch.device) -> dict[str, Measured]:
    """Plans by operand and sizes: `tiles 4096x6144 8 bits 16 wide` -> `["fused", 1, 4, 2, 3]`, the kernel and
    the fields of its plan.

    Empty on a CPU and, said once, on a GPU that nothing was measured on: launchers then use their own rule.
    One dict for all GPUs of a name: what the tuner puts there is used at once.
    """
    return _read(torch.cuda.get_device_name(device)) if device.type == "cuda" else {}


@lru_cache(maxsize=8)
def _read(name: str) -> dict[str, Measured]:
    if not path(name).is_file():
        logger.info(
            "kernels: no measured block sizes for %s, using rules of thumb; "
            "`qrt-eval kernels --tune` measures them",
            name,
        )
        return {}
    found: dict[str, Measured] = json.loads(path(name).read_text())
    return found
