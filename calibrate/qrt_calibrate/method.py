"""What a calibration method is: a layer's tensors in, its quantized Linears out; METHODS lists them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qrt.arch import Arch, ModelConfig
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.weight import WeightData
from qrt.registry import Registry
from qrt_calibrate.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """One calibration: the checkpoint and how to read it, the recipe, and the Linears to quantize."""

    checkpoint: Checkpoint
    arch: Arch
    config: ModelConfig
    recipe: Recipe
    device: torch.device
    quantized: frozenset[str]  # full names, e.g. "model.layers.0.self_attn.q_proj"

    @property
    def scale_dtype(self) -> torch.dtype:
        """The model's dtype, to which loaders cast every scale."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    def projections(self, index: int) -> list[str]:
        """The Linears of layer `index` to quantize, relative to the layer, in fuse order."""
        prefix = self.layer_name(index)
        return [name for name in self.arch.projections if f"{prefix}.{name}" in self.quantized]

    def layer_name(self, index: int) -> str:
        """Full name of layer `index`."""
        return f"{self.arch.layers}.{index}"


@dataclass(frozen=True)
class LayerResult:
    """A finished layer; names are relative to it and tensors lie on the CPU.

    linears   quantized weights with their biases
    tensors   everything else, in its stored dtype
    figures   what the report shows of the layer, by column title
    """

    linears: dict[str, WeightData]
    tensors: dict[str, Tensor]
    figures: dict[str, float]


class Method(ABC):
    """Quantizes the layers of one job, first to last."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def metadata(self) -> dict[str, Any]:
        """What the checkpoint's config records besides the recipe, e.g. the calibration text."""
        return {}

    @abstractmethod
    def quantize(self, index: int, tensors: Mapping[str, Tensor]) -> LayerResult:
        """Layer `index`, whose stored tensors are `tensors` (names relative to the layer)."""


METHODS: Registry[type[Method]] = Registry(
    "calibration method",
    {
        "rtn": "qrt_calibrate.rtn:RoundToNearest",
        "awq": "qrt_calibrate.awq:Awq",
    },
)
