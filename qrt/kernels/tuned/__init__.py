"""Block sizes that `qrt-eval kernels --tune` found, one JSON file per GPU. Nothing is tuned while serving."""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from qrt.kernels.gpu import multiprocessors

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SAME_CHIP = {((9, 0), 132): "NVIDIA H200"}  # by capability and multiprocessors: H100 SXM, GH200
Measured = list[Any]  # the name of a kernel's plan, and its numbers
BETWEEN = (384, 640, 768, 896, 1280, 1536, 1792)  # widths between powers of two, where blocks fit badly


def path(device_name: str) -> Path:
    """Return the file of the GPU with this CUDA name: `NVIDIA H200` -> nvidia_h200.json."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".json")


@lru_cache(maxsize=8)
def configs(device: torch.device) -> dict[str, Measured]:
    """Return the measured plans of a GPU by operand and sizes.

    An entry is `tiles 4096x6144 8 bits 16 wide` -> `["fused", 1, 4, 2, 3]`: the kernel and the fields of its
    plan. A GPU that was not measured gets the plans of one with the same chip, or none; launchers then use
    their own rule. Either is logged once. All GPUs of a name share one dict, so that what the tuner puts
    there is used at once.
    """
    if device.type != "cuda":
        return {}
    chip = torch.cuda.get_device_capability(device), multiprocessors(device)
    return _read(torch.cuda.get_device_name(device), SAME_CHIP.get(chip))


def plan_of(
    table: Mapping[str, Measured], key: Callable[[int], str], tokens: int, width: int
) -> Measured | None:
    """Return the plan measured for `tokens` tokens, or None.

    That is the plan of the narrowest width in BETWEEN that holds the tokens, if it is narrower than `width`
    and was measured, else the plan of `width`. `key` gives the name in `table` of a width.
    """
    place = bisect_left(BETWEEN, tokens)
    if place < len(BETWEEN) and BETWEEN[place] < width:
        found = table.get(key(BETWEEN[place]))
        if found is not None:
            return found
    return table.get(key(width))


@lru_cache(maxsize=8)
def _read(name: str, like: str | None) -> dict[str, Measured]:
    measured = path(name).is_file()
    if not measured:
        logger.info(
            "kernels: no measured block sizes for %s, using %s; `qrt-eval kernels --tune` measures them",
            name,
            f"those of {like}" if like else "rules of thumb",
        )
    file = path(name if measured or like is None else like)
    found: dict[str, Measured] = json.loads(file.read_text()) if file.is_file() else {}
    return found
