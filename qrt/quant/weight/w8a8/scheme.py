"""int8 weights with one scale per output channel, int8 activations with one measured scale per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.checks import expect
from qrt.errors import UnsupportedError
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight.base import Layout, WeightData, WeightScheme

_EXACT_INPUTS = 1024  # fp32 holds the sum of so many int8 products (at most 2^14 each) exactly


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [T, K] @ b [N, K].T of int8 codes, exact, int32 [T, N].

    `torch._int_mm` is exact where the CPU adds int8 products in 32 bits (VNNI). Elsewhere it is a plain loop,
    or may saturate at 16 bits. It is not used for K of 1: torch 2.13 reads past the end there.
    """
    if a.device.type == "cpu" and a.shape[1] > 1 and _adds_in_32_bits():
        return torch._int_mm(a, b.T)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for left, right in zip(a.split(_EXACT_INPUTS, 1), b.split(_EXACT_INPUTS, 1), strict=True):
        total += (left.float() @ right.float().T).to(torch.int32)
    return total


def _adds_in_32_bits() -> bool:
    """Return whether this CPU adds int8 products in 32 bits (VNNI)."""
    return torch.cpu._is_vnni_supported()


class W8A8Scheme(WeightScheme):
    """y = (xq @ Wq.T) * sx * sw + bias with xq, sx from `affine.quantize_tokens`, or given.

    Run-time tensors: (codes [N, K] int8, scale [N] fp32, arrivals [N] int32). The int32 sum holds K up to
    131,071; arrivals are the kernel's split-K counters, 0 between calls.
    """

    name = "w8a8"
    spec = QuantSpec(8, symmetric=True, granularity=Granularity.CHANNEL)
    layout = Layout.INT8_ROWS
    int8_tokens = True
    stored, head, method = "int-quantized", "w8a8", "smoothquant-gptq"

    def prepare(self, weight: WeightData, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        groups = 0 if weight.scale is None else weight.scale.shape[1]
        if weight.scale is None or groups > 1 or weight.bits != 8 or weight.zero is not None:
            kind = "symmetric" if weight.zero is None else "asymmetric"
            raise UnsupportedError(
                "w8a8: expected symmetric 8-bit codes with one scale per output channel, "
                f"got {kind} {weight.bits}-bit codes with {groups} scales a row; "
                "quantize again with --scheme w8a8"
            )
        values = weight.values.to(device)
        if weight.perm is not None:  # one scale a row: columns can simply go back to input order
            values = values[:, torch.argsort(weight.perm).to(device)]
        codes = (values ^ 128).view(torch.int8)  # stored code 0..255 -> code - 128
        arrivals = torch.zeros(weight.out_features, dtype=torch.int32, device=device)
        return codes, weight.scale.to(device, torch.float32).flatten(), arrivals

    def linear_ref(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return self.linear_int8_ref(QuantizedTokens.of(x), tensors, bias)

    def linear_int8_ref(self, x: QuantizedTokens, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        codes, scale, _ = tensors
        expect(x.codes, "T K", name="x", K=codes.shape[1])
        y = integer_product(x.codes, codes).float() * x.scale[:, None] * scale
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def explain_cpu(self, tensors: Sequence[Tensor]) -> str:
        how = (
            "Torch's int8 product" if _adds_in_32_bits() else "Torch's fp32 product of 1,024 inputs at a time"
        )
        return f"{how} multiplies tokens that are quantized first."

    def out_features(self, tensors: Sequence[Tensor]) -> int:
        return tensors[0].shape[0]


W8A8 = W8A8Scheme()
