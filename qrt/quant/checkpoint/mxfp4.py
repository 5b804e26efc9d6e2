"""MXFP4 as OpenAI publishes gpt-oss, and as compressed-tensors stores it.

gpt-oss has all experts of a layer in one tensor, and everything else in 16 bits:

P_blocks           uint8 [E, N, K/32, 16]    codes, the first of two in the low bits of a byte
P_scales           uint8 [E, N, K/32]        s of 2^(s - 127)
P_bias             float [E, N]

`folder.ExpertTensors` is one of them, whose tensors are `P.weight_blocks` [N, K/32, 16] and so on.
compressed-tensors calls it "mxfp4-pack-quantized", for each Linear:

P.weight_packed    uint8 [N, K/2]            likewise
P.weight_scale     uint8 [N, K/32]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from qrt.errors import CheckpointError
from qrt.quant import e2m1
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.format import CheckpointFormat, Plain, bias_of, group_count
from qrt.quant.module_names import names_of
from qrt.quant.spec import Codes, QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.base import WeightData

SCHEME = "mxfp4"
EXPERTS = re.compile(r".*[.]experts[.][^.]*")  # the modules that the method means


class Mxfp4(CheckpointFormat):
    """quant_method "mxfp4"."""

    def __init__(self, config: Mapping[str, Any], tensors: TensorFolder) -> None:
        left = config.get("modules_to_not_convert") or []
        where = f"{tensors.path}: quantization_config.modules_to_not_convert"
        if not isinstance(left, list) or not all(isinstance(name, str) for name in left):
            raise CheckpointError(f"{where}: expected a list of names, got {left!r}")
        try:
            self._left = [re.compile(name) for name in left]  # as transformers takes them
        except re.error as error:
            raise CheckpointError(f"{where}: expected regular expressions, got {left!r} ({error})") from None

    def linear(self, tensors: TensorFolder, module: str) -> tuple[str, WeightData]:
        """Decode `module` where it has blocks; unquantized where it has a plain weight."""
        blocks, scales = f"{module}.weight_blocks", f"{module}.weight_scales"
        if not tensors.has(blocks):
            return Plain().linear(tensors, module)
        shape = f"N K/{e2m1.GROUP} {e2m1.GROUP // 2}"
        return SCHEME, _decode(tensors, module, blocks, shape, scales)

    def grid(self, module: str) -> tuple[str, QuantSpec | None]:
        """See CheckpointFormat."""
        names = names_of(module)
        left = any(rule.match(name) or name.endswith(rule.pattern) for rule in self._left for name in names)
        if left or not EXPERTS.fullmatch(module):
            return "fp16", None
        return SCHEME, WEIGHT_SCHEMES[SCHEME].spec


def packed_linear(tensors: TensorFolder, module: str) -> WeightData:
    """Decode a Linear of compressed-tensors."""
    return _decode(tensors, module, f"{module}.weight_packed", "N K/2", f"{module}.weight_scale")


def _decode(tensors: TensorFolder, module: str, codes: str, shape: str, scales: str) -> WeightData:
    """Return the weight of two codes a byte under the name `codes`, and exponents under the name `scales`."""
    sizes = tensors.sizes(codes, shape, torch.uint8)
    packed = tensors.tensor(codes, shape, torch.uint8).flatten(1)
    group_count(tensors, module, e2m1.GROUP, sizes["K"])
    exponents = tensors.tensor(scales, f"N K/{e2m1.GROUP}", torch.uint8, **sizes)
    if (exponents == e2m1.NAN).any():
        raise CheckpointError(
            f"{tensors.path}: {tensors.name_in_messages(scales)}: expected powers of two, 0 to 254, "
            f"got {e2m1.NAN}, which is not a number; download the checkpoint again"
        )
    values = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    bias = bias_of(tensors, module, sizes["N"])
    return WeightData(values, e2m1.scales(exponents), bias=bias, bits=4, codes=Codes.E2M1)
