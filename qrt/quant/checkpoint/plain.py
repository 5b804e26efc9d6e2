"""Unquantized checkpoints: every Linear is `P.weight` [N, K] and perhaps `P.bias` [N]."""

from __future__ import annotations

from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.format import FLOATS, CheckpointFormat, bias_of
from qrt.quant.spec import QuantSpec
from qrt.quant.weight.base import WeightData


class Plain(CheckpointFormat):
    """Weights as they are."""

    def linear(
        self, tensors: TensorFolder, module: str, *, transposed: bool = False
    ) -> tuple[str, WeightData]:
        """Return "fp16" and the weight in its stored dtype; if `transposed`, it is stored [K, N]."""
        weight = tensors.tensor(f"{module}.weight", "K N" if transposed else "N K", FLOATS)
        weight = weight.T.contiguous() if transposed else weight
        return "fp16", WeightData(weight, bias=bias_of(tensors, module, weight.shape[0]))

    def grid(self, module: str) -> tuple[str, QuantSpec | None]:
        """See CheckpointFormat."""
        return "fp16", None
