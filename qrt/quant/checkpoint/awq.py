"""AWQ's "gemm" layout, as AutoAWQ writes it (docs/checkpoint-formats.md#awq).

Weights lie transposed, [K, N]:

P.qweight  int32   [K, N/8]    u, a bit stream along N; slot i of each 8 holds column (0,2,4,6,1,3,5,7)[i]
P.qzeros   int32   [K/G, N/8]  zeros, in the same order; all 8 in a symmetric checkpoint
P.scales   float16 [K/G, N]    in plain order
P.bias     float16 [N]         where the Linear has one
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint.folder import MISMATCH, TensorFolder
from qrt.quant.checkpoint.format import FLOATS, REMEDY, CheckpointFormat, Plain, bias_of, group_count, setting
from qrt.quant.packing import pack, unpack
from qrt.quant.weight import WeightData, weight_only

BITS, MIDPOINT = 4, 8
SLOT_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
COLUMN_OF_SLOT = (0, 2, 4, 6, 1, 3, 5, 7)


class AwqGemm(CheckpointFormat):
    """quant_method "awq"; also the older spellings of llm-awq's quant_config.json."""

    def __init__(self, config: Mapping[str, Any], tensors: TensorFolder) -> None:
        where = f"{tensors.path}: quantization_config"
        names = ("version", "checkpoint_format", "format")  # AutoAWQ's, GPTQModel's, its newer one
        version = next((str(config[name]).lower() for name in names if config.get(name)), "gemm")
        if version != "gemm":
            raise UnsupportedError(
                f"{where}.version: expected 'gemm', got {version!r}, another layout of the words; "
                "quantize again with version gemm, or with qrt-calibrate"
            )
        bits = setting(where, config, ("bits", "w_bit"), BITS)
        if bits != BITS:
            raise UnsupportedError(f"{where}: expected AWQ with {BITS} bits, got {bits}; {REMEDY}")
        self._group = setting(where, config, ("group_size", "q_group_size"), 128)
        self._symmetric = config.get("zero_point", True) is False

    def linear(self, tensors: TensorFolder, module: str) -> tuple[str, WeightData]:
        """Decode `module` where it has packed words; unquantized where it has a plain weight."""
        if not tensors.has(f"{module}.qweight"):
            return Plain().linear(tensors, module)
        sizes = tensors.sizes(f"{module}.qweight", "K N/8", torch.int32)
        words = tensors.tensor(f"{module}.qweight", "K N/8", torch.int32)
        group = sizes["K"] // group_count(tensors, module, self._group, sizes["K"])
        scales = tensors.tensor(f"{module}.scales", f"K/{group} N", FLOATS, **sizes)
        zeros = tensors.tensor(f"{module}.qzeros", f"K/{group} N/8", torch.int32, **sizes)
        zero = unpack_columns(zeros).T.contiguous()
        if self._symmetric and not (zero == MIDPOINT).all():
            raise CheckpointError(
                f"{tensors.path}: {module}.qzeros holds zero points, but zero_point is false; {MISMATCH}"
            )
        data = WeightData(
            unpack_columns(words).T.contiguous(),
            scales.T.contiguous(),
            None if self._symmetric else zero,
            bias=bias_of(tensors, module, sizes["N"]),
            bits=BITS,
        )
        return weight_only()[BITS], data


def unpack_columns(words: Tensor) -> Tensor:
    """Unpack int32 [R, N/8] to codes uint8 [R, N], columns in plain order."""
    slots = unpack(words, BITS, words.shape[1] * 8).unflatten(1, (-1, 8))
    return slots[..., SLOT_OF_COLUMN].flatten(1)


def pack_columns(codes: Tensor) -> Tensor:
    """Undo `unpack_columns`; N is a multiple of 8."""
    return pack(codes.unflatten(1, (-1, 8))[..., COLUMN_OF_SLOT].flatten(1), BITS)


def encode(weight: WeightData) -> dict[str, Tensor]:
    """Encode a 4-bit weight in input order: its tensors by suffix, without the bias."""
    assert weight.scale is not None and weight.perm is None and weight.bits == BITS
    zero = torch.full_like(weight.scale, MIDPOINT, dtype=torch.uint8) if weight.zero is None else weight.zero
    return {
        "qweight": pack_columns(weight.values.T),
        "qzeros": pack_columns(zero.T),
        "scales": weight.scale.T.half().contiguous(),
    }
