"""fp8 in blocks, as DeepSeek, Qwen and transformers write it, and per tensor or row, as AutoFP8 does.

P.weight            fp8   [N, K]                      weight / scale, e4m3
P.weight_scale_inv  float [ceil(N/B0), ceil(K/B1)]    the scale of each block, in spite of its name
P.weight_scale      float [1], a scalar, [N] or [N,1] AutoFP8 stores it instead
P.input_scale       float [1]                         scale of static activations; not read
P.bias              float [N]                         where the Linear has one
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.format import CheckpointFormat, Plain, block_of
from qrt.quant.checkpoint.layout import FloatQuantized
from qrt.quant.spec import QuantSpec
from qrt.quant.weight.base import WeightData

logger = logging.getLogger(__name__)

SCALES = ("weight_scale_inv", "weight_scale")


class Fp8(CheckpointFormat):
    """quant_method "fp8"; its weights are read as 16-bit weights, like the fp8 of compressed-tensors."""

    def __init__(self, config: Mapping[str, Any], tensors: TensorFolder) -> None:
        size = config.get("weight_block_size")
        where = f"{tensors.path}: quantization_config.weight_block_size"
        self._block = None if size is None else block_of(where, size)
        logger.warning("%s: fp8 weights run as 16-bit weights, activations are not rounded", tensors.path)

    def linear(self, tensors: TensorFolder, module: str) -> tuple[str, WeightData]:
        """Decode `module` where it has scales; unquantized where it has none (modules_to_not_convert)."""
        for scale in SCALES:
            if tensors.has(f"{module}.{scale}"):
                return "fp16", FloatQuantized(self._block, scale).decode(tensors, module)
        return Plain().linear(tensors, module)

    def grid(self, module: str) -> tuple[str, QuantSpec | None]:
        """See CheckpointFormat; fp8 weights are plain ones once they are loaded."""
        return "fp16", None
