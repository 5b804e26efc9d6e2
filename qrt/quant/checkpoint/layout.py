"""The tensor layouts of compressed-tensors that qrt reads; it writes all of them but fp8.

See docs/checkpoint-formats.md#compressed-tensors.

The integer layouts store signed codes and zeros q = u - 2^(b-1), where u is the unsigned code of WeightData.

    pack-quantized  P.weight_packed      int32 [N, ceil(K*b/32)]   u, a bit stream along K
                    P.weight_scale       float [N, K/G]
                    P.weight_zero_point  int32 [ceil(N*b/32), K/G] zeros, a bit stream along N; if asymmetric
                                         int8 [N, K/G]             in old files
                    P.weight_shape       int64 [2]                 N, K
                    P.weight_g_idx       int32 [K]                 group of each input, in old files
    int-quantized   P.weight             int8  [N, K]              q
                    P.weight_scale       float [N, K/G]            [N, 1] of 8 bits
    float-quantized P.weight             fp8   [N, K]              weight / scale, e4m3
                    P.weight_scale       float [N, 1], [1] or one for each block [ceil(N/B0), ceil(K/B1)]
    all             P.bias               float [N]                 where the Linear has one
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from qrt.errors import CheckpointError
from qrt.quant.checkpoint.folder import MISMATCH, TensorFolder
from qrt.quant.checkpoint.format import FLOATS, bias_of, group_count, order_of
from qrt.quant.packing import WORD_BITS, pack, unpack
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight.base import WeightData

BLOCK = (128, 128)  # rows and columns of a scale of fp8, where a config does not say it


class CodeLayout(ABC):
    """How the codes of one Linear lie in tensors; `name` is compressed-tensors' `format`."""

    name: ClassVar[str]

    @abstractmethod
    def holds(self, spec: QuantSpec) -> bool:
        """Whether grids of `spec` can be stored."""

    @abstractmethod
    def encode(self, weight: WeightData) -> dict[str, Tensor]:
        """Encode a quantized weight: its tensors by suffix ("weight_packed"), without the bias."""

    @abstractmethod
    def decode(self, tensors: TensorFolder, module: str, spec: QuantSpec) -> WeightData:
        """Undo `encode`, with the bias; raises CheckpointError when a tensor is absent or does not fit."""


class PackQuantized(CodeLayout):
    """Codes and zeros are bit streams in int32 words."""

    name = "pack-quantized"

    def holds(self, spec: QuantSpec) -> bool:
        return spec.granularity in (Granularity.GROUP, Granularity.CHANNEL)

    def encode(self, weight: WeightData) -> dict[str, Tensor]:
        assert weight.scale is not None and weight.perm is None
        stored = {
            "weight_packed": pack(weight.values, weight.bits),
            "weight_scale": weight.scale,
            "weight_shape": torch.tensor(weight.values.shape, dtype=torch.int64),
        }
        if weight.zero is not None:
            stored["weight_zero_point"] = pack(weight.zero, weight.bits, axis=0)
        return stored

    def decode(self, tensors: TensorFolder, module: str, spec: QuantSpec) -> WeightData:
        n, k = tensors.tensor(f"{module}.weight_shape", "2", torch.int64).tolist()
        sizes = {"N": n, "K": k}
        groups = group_count(tensors, module, spec.group_size or -1, k)
        packed, group = f"*{spec.bits}/{WORD_BITS}", f"/{k // groups}"
        words = tensors.tensor(f"{module}.weight_packed", f"N K{packed}", torch.int32, **sizes)
        scale = tensors.tensor(f"{module}.weight_scale", f"N K{group}", FLOATS, **sizes)
        zero, name = None, f"{module}.weight_zero_point"
        if tensors.has(name) and tensors.spec(name).dtype == torch.int8:
            signed = tensors.tensor(name, f"N K{group}", torch.int8, **sizes)
            zero = (signed.to(torch.int16) + spec.midpoint).to(torch.uint8)
        elif not spec.symmetric or tensors.has(name):
            zeros = tensors.tensor(name, f"N{packed} K{group}", torch.int32, **sizes)
            zero = unpack(zeros, spec.bits, len(tensors.outputs(n)), axis=0)
        if spec.symmetric and zero is not None:
            _expect_neutral(tensors, name, zero, spec.midpoint)
            zero = None
        codes = unpack(words, spec.bits, len(tensors.inputs(k)))
        perm = order_of(tensors, f"{module}.weight_g_idx", groups, k)
        if perm is not None:
            codes = codes[:, perm]
        return WeightData(codes, scale, zero, perm, bias_of(tensors, module, n), spec.bits)


class IntQuantized(CodeLayout):
    """Signed codes, one byte each, without zero points: of 8 bits, or as other tools write w4a8."""

    name = "int-quantized"

    def holds(self, spec: QuantSpec) -> bool:
        bytes_of_rows = spec.bits == 8 and spec.granularity is Granularity.CHANNEL
        return spec.symmetric and (bytes_of_rows or spec.progressive)

    def encode(self, weight: WeightData) -> dict[str, Tensor]:
        assert weight.scale is not None and weight.zero is None and weight.perm is None
        codes = weight.values - (1 << (weight.bits - 1))  # bytes wrap around
        return {"weight": codes.view(torch.int8), "weight_scale": weight.scale}

    def decode(self, tensors: TensorFolder, module: str, spec: QuantSpec) -> WeightData:
        name = f"{module}.weight"
        codes = tensors.tensor(name, "N K", torch.int8).view(torch.uint8) + spec.midpoint  # bytes wrap around
        n, k = tensors.spec(name).shape
        group = k // group_count(tensors, module, spec.group_size or -1, k)
        scale = tensors.tensor(f"{module}.weight_scale", f"N K/{group}", FLOATS, N=n, K=k)
        _expect_no_zeros(tensors, module)
        if codes.numel() and int(codes.max()) >= spec.levels:
            raise CheckpointError(f"{tensors.path}: {name} holds more than {spec.bits} bits; {MISMATCH}")
        return WeightData(codes, scale, bias=bias_of(tensors, module, n), bits=spec.bits)


class FloatQuantized:
    """fp8 weights, read as 16-bit weights and never written: qrt has no fp8 products.

    block    rows and columns that share a scale, None meaning all of them; the last block may be smaller.
             None for both: the scales tell, of which there is one, one of each row, or one of each BLOCK
    scale    suffix of the scales
    """

    name = "float-quantized"

    def __init__(self, block: tuple[int | None, int | None] | None, scale: str = "weight_scale") -> None:
        self.block, self.scale = block, scale

    def decode(self, tensors: TensorFolder, module: str) -> WeightData:
        """Read the weight and its bias; raises CheckpointError when a tensor is absent or does not fit."""
        weight = tensors.tensor(f"{module}.weight", "N K", torch.float8_e4m3fn)
        n, k = shape = tensors.spec(f"{module}.weight").shape
        name = f"{module}.{self.scale}"
        block = self.block or _block_of(tensors.spec(name).shape, n)
        rows, columns = (max(1, min(own or size, size)) for own, size in zip(block, shape, strict=True))
        blocks = -(-n // rows), -(-k // columns)
        if prod(tensors.spec(name).shape) == blocks[0] and blocks[1] == 1:  # a scalar, [1], [N] or with 1s
            scale = tensors.tensor(name, dtype=FLOATS).reshape(-1, 1)
        else:
            scale = tensors.tensor(name, "B0 B1", FLOATS, B0=blocks[0], B1=blocks[1])
        _expect_no_zeros(tensors, module)
        spread = scale.float()[tensors.outputs(n) // rows][:, tensors.inputs(k) // columns]
        return WeightData((weight.float() * spread).to(scale.dtype), bias=bias_of(tensors, module, n))


def _block_of(scales: tuple[int, ...], rows: int) -> tuple[int | None, int | None]:
    """Return the block that scales of this shape tell, of a weight with so many rows."""
    if prod(scales) == 1:
        return None, None
    return (1, None) if scales in ((rows,), (rows, 1)) else BLOCK


def _expect_no_zeros(tensors: TensorFolder, module: str) -> None:
    """CheckpointError where a symmetric weight has zero points other than 0, which old files store."""
    name = f"{module}.weight_zero_point"
    if tensors.has(name):
        _expect_neutral(tensors, name, tensors.tensor(name).float(), 0)


def _expect_neutral(tensors: TensorFolder, name: str, zero: Tensor, neutral: int) -> None:
    if not (zero == neutral).all():
        raise CheckpointError(
            f"{tensors.path}: {name} holds zero points, but its weights are symmetric; {MISMATCH}"
        )
