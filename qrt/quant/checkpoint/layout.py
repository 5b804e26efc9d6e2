"""The two tensor layouts of compressed-tensors that qrt reads and writes (research/weights.md 1.3).

Both store signed codes q = u - 2^(b-1), where u is WeightData's unsigned code; zeros likewise.

    pack-quantized  P.weight_packed      int32 [N, ceil(K*b/32)]   u, a bit stream along K
                    P.weight_scale       float [N, K/G]
                    P.weight_zero_point  int32 [ceil(N*b/32), K/G] zeros, a bit stream along N; if asymmetric
                    P.weight_shape       int64 [2]                 N, K
    int-quantized   P.weight             int8  [N, K]              q
                    P.weight_scale       float [N, 1]
    both            P.bias               float [N]                 where the Linear has one
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.format import FLOATS, bias_of
from qrt.quant.packing import pack, packed_words, unpack
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight.base import WeightData


class Layout(ABC):
    """How the codes of one Linear lie in tensors; `name` is compressed-tensors' `format`."""

    name: ClassVar[str]

    @abstractmethod
    def holds(self, spec: QuantSpec) -> bool:
        """Whether grids of `spec` can be stored."""

    @abstractmethod
    def encode(self, weight: WeightData) -> dict[str, Tensor]:
        """Tensors of a quantized weight by suffix ("weight_packed"), without the bias."""

    @abstractmethod
    def decode(self, tensors: TensorFolder, module: str, spec: QuantSpec) -> WeightData:
        """The inverse of `encode`, with the bias; CheckpointError when a tensor is absent or does not fit."""


class PackQuantized(Layout):
    """Codes and zeros as bit streams in int32 words."""

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
        if tensors.has(f"{module}.weight_g_idx"):
            raise UnsupportedError(
                f"{tensors.path}: {module}.weight_g_idx: activation order with a group index is not read; "
                'quantize with actorder "static" or none'
            )
        n, k = tensors.tensor(f"{module}.weight_shape", "2", torch.int64).tolist()
        groups = _groups(tensors, module, spec, k)
        words = tensors.tensor(
            f"{module}.weight_packed", "N W", torch.int32, N=n, W=packed_words(k, spec.bits)
        )
        scale = tensors.tensor(f"{module}.weight_scale", "N G", FLOATS, N=n, G=groups)
        zero = None
        if not spec.symmetric:
            zeros = tensors.tensor(
                f"{module}.weight_zero_point", "Z G", torch.int32, Z=packed_words(n, spec.bits), G=groups
            )
            zero = unpack(zeros, spec.bits, n, axis=0)
        bias = bias_of(tensors, module, n)
        return WeightData(unpack(words, spec.bits, k), scale, zero, bias=bias, bits=spec.bits)


class IntQuantized(Layout):
    """Signed codes as they are, one byte each; symmetric, 8 bits."""

    name = "int-quantized"

    def holds(self, spec: QuantSpec) -> bool:
        return spec.bits == 8 and spec.symmetric and spec.granularity is Granularity.CHANNEL

    def encode(self, weight: WeightData) -> dict[str, Tensor]:
        assert weight.scale is not None and weight.zero is None and weight.perm is None
        return {"weight": _flip(weight.values).view(torch.int8), "weight_scale": weight.scale}

    def decode(self, tensors: TensorFolder, module: str, spec: QuantSpec) -> WeightData:
        codes = tensors.tensor(f"{module}.weight", "N K", torch.int8)
        n, k = codes.shape
        scale = tensors.tensor(
            f"{module}.weight_scale", "N G", FLOATS, N=n, G=_groups(tensors, module, spec, k)
        )
        bias = bias_of(tensors, module, n)
        return WeightData(_flip(codes.view(torch.uint8)), scale, bias=bias, bits=spec.bits)


def _flip(codes: Tensor) -> Tensor:
    """Bytes of q = u - 128 from bytes of u, and back: the top bit changes."""
    return codes ^ 0x80


def _groups(tensors: TensorFolder, module: str, spec: QuantSpec, in_features: int) -> int:
    """Scales per output row."""
    group = spec.group_size or in_features
    if in_features % group:
        raise CheckpointError(
            f"{tensors.path}: {module}: group_size {group} does not divide its {in_features} input features; "
            "the file does not match its config.json"
        )
    return in_features // group
