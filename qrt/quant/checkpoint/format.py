"""What a checkpoint format is: how one Linear's weight is found among the tensors of a folder."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.weight.base import WeightData

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class CheckpointFormat(ABC):
    """One `quant_method`; made from `quantization_config` and the opened tensors of a folder."""

    @abstractmethod
    def linear(self, tensors: TensorFolder, module: str) -> tuple[str, WeightData]:
        """Scheme name (a key of WEIGHT_SCHEMES) and canonical weight of `module`.

        Raises CheckpointError when a tensor is absent or does not fit, UnsupportedError for a layout that
        qrt does not read.
        """


def bias_of(tensors: TensorFolder, module: str, out_features: int) -> Tensor | None:
    """The bias [N] of a Linear, or None where it has none."""
    name = f"{module}.bias"
    return tensors.tensor(name, "N", FLOATS, N=out_features) if tensors.has(name) else None
