"""Unquantized checkpoints: every Linear is `P.weight` [N, K] and perhaps `P.bias` [N]."""

from __future__ import annotations

from qrt.errors import CheckpointError
from qrt.quant.checkpoint.folder import MISMATCH, TensorFolder
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

    def expert(
        self, tensors: TensorFolder, module: str, index: int, *, transposed: bool = False
    ) -> tuple[str, WeightData]:
        """Return "fp16" and the weight of one expert in its stored dtype; see `Checkpoint.expert`."""
        weights = tensors.tensor(module, "E K N" if transposed else "E N K", FLOATS)
        if index >= len(weights):
            raise CheckpointError(
                f"{tensors.path}: {module}: expected more than {index} experts, got {len(weights)}; "
                f"{MISMATCH}"
            )
        weight = weights[index].T.contiguous() if transposed else weights[index]
        bias, name = None, f"{module}_bias"
        if tensors.has(name):
            bias = tensors.tensor(name, "E N", FLOATS, E=len(weights), N=weight.shape[0])[index]
        return "fp16", WeightData(weight, bias=bias)

    def grid(self, module: str) -> tuple[str, QuantSpec | None]:
        """See CheckpointFormat."""
        return "fp16", None
