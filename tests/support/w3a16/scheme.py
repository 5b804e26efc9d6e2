"""3-bit weights, a code in each byte: groups share a scale and, when asymmetric, a zero point."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qrt.errors import UnsupportedError
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight.base import WeightData, WeightScheme


class W3A16Scheme(WeightScheme):
    """Run-time tensors: (code - zero, int8 [N, K]; scale [N, K/G])."""

    name = "w3a16"
    spec = QuantSpec(3, symmetric=False, granularity=Granularity.GROUP, group_size=32)
    stored, head, method = "pack-quantized", "w8a16", "awq-gptq"

    def prepare(self, weight: WeightData, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if weight.bits != 3 or weight.scale is None or weight.perm is not None:
            raise UnsupportedError(f"w3a16: expected 3-bit codes in input order, got {weight.bits} bits")
        zero = torch.full_like(weight.scale, 4) if weight.zero is None else weight.zero
        group = weight.in_features // weight.scale.shape[1]
        codes = weight.values.char() - zero.char().repeat_interleave(group, 1)
        return codes.to(device), weight.scale.to(device)

    def linear_ref(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        codes, scale = tensors
        matrix = codes.unflatten(1, (scale.shape[1], -1)) * scale.float()[..., None]
        return F.linear(x.float(), matrix.flatten(1), None if bias is None else bias.float()).to(x.dtype)

    def out_features(self, tensors: Sequence[Tensor]) -> int:
        return tensors[0].shape[0]


W3A16 = W3A16Scheme()
