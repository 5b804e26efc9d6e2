"""What a weight scheme is, and the one struct that readers, calibrator and schemes exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from qrt.quant import affine
from qrt.quant.spec import QuantSpec
from qrt.quant.tokens import QuantizedTokens


@dataclass(frozen=True)
class WeightData:
    """One Linear's weight in canonical form, whatever checkpoint format it came from.

    values  [N, K]  codes uint8 0..2^b-1, or the weight itself (fp16/bf16/fp32) when unquantized
    scale   [N, K/G] in the model dtype; None when unquantized
    zero    [N, K/G] uint8; None when symmetric (the zero is then 2^(b-1)) or unquantized
    perm    [K] int64; column j of `values` multiplies input perm[j] (GPTQ act-order); None = identity
    bias    [N] in the model dtype, or None
    bits    code width; 0 when unquantized
    """

    values: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    perm: Tensor | None = None
    bias: Tensor | None = None
    bits: int = 0

    @property
    def out_features(self) -> int:
        """N."""
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.values.shape[1]

    def dequantize(self) -> Tensor:
        """The weight as fp32 [N, K], columns in input order."""
        if self.scale is None:
            return self.values.float()
        weight = affine.dequantize(self.values, self.scale, self.zero, self.bits)
        return weight if self.perm is None else weight[:, torch.argsort(self.perm)]


def fuse(parts: Sequence[WeightData]) -> WeightData:
    """Stack weights that read the same input along N (q, k, v or gate, up).

    All parts must have the same bits, group count, symmetry and permutation; ValueError otherwise.
    """
    first = parts[0]
    if any(_kind(part) != _kind(first) for part in parts):
        raise ValueError("parts of a fused Linear differ in bits, groups, symmetry or permutation")
    biases = [part.bias for part in parts]
    some = next((bias for bias in biases if bias is not None), None)
    if some is not None:  # a fused layer has a bias if any part has one
        biases = [some.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
    return WeightData(
        torch.cat([part.values for part in parts]),
        _stack([part.scale for part in parts]),
        _stack([part.zero for part in parts]),
        first.perm,
        _stack(biases),
        first.bits,
    )


def _kind(part: WeightData) -> tuple[object, ...]:
    """What parts of a fused weight have in common."""
    groups = None if part.scale is None else part.scale.shape[1]
    return part.bits, groups, part.zero is None, None if part.perm is None else part.perm.tolist()


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """None where there is none."""
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(found) if found else None


class Layout(Enum):
    """How a weight lies on the device: what a kernel asks for to read it."""

    PLAIN = "the weight [N, K] in the model's dtype"
    TILES = "integers in a `qrt.quant.weight.tiles.TiledWeight`"
    INT8_ROWS = "codes int8 [N, K], scale fp32 [N], arrivals int32 [N]"
    OWN = "known to the scheme alone: its definition multiplies"


class WeightScheme(ABC):
    """How one Linear's weight is stored on the device and multiplied.

    A scheme is a stateless object in WEIGHT_SCHEMES. Its run-time tensors are a tuple in a fixed order
    that the scheme's docstring documents; `qrt::linear` hands them back to it.
    """

    name: ClassVar[str]
    spec: ClassVar[QuantSpec | None]  # default grid of the weight; None when unquantized
    layout: ClassVar[Layout] = Layout.OWN
    int8_tokens: ClassVar[bool] = False  # whether it quantizes x per token, and takes QuantizedTokens too
    stored: ClassVar[str | None] = None  # compressed-tensors' format of its codes; None: it writes no file
    head: ClassVar[str | None]  # scheme of an int8 head behind layers in it; None: the head stays as it is
    method: ClassVar[str | None]  # qrt-calibrate's default; None: it does not calibrate it

    @abstractmethod
    def prepare(self, weight: WeightData, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Canonical weight -> run-time tensors on `device`, repacked for the kernel; `dtype` is the model's.

        Raises UnsupportedError for a grid the kernels do not run (names what came and what is run).
        """

    def prepare_cpu(self, weight: WeightData, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Canonical weight -> run-time tensors on the CPU, in the layout of one of torch's own products where
        it has a fast one for this weight in `dtype`, else as `prepare`."""
        return self.prepare(weight, torch.device("cpu"), dtype)

    @abstractmethod
    def linear_ref(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype, from the definition, in fp32: oracle and spec."""

    def linear_cpu(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """The same on the CPU, for tensors of `prepare_cpu` and of `prepare`: torch's product or, where there
        is none, the reference."""
        return self.linear_ref(x, tensors, bias)

    def explain_cpu(self, tensors: Sequence[Tensor]) -> str:
        """Return what `linear_cpu` multiplies such tensors with, in a sentence."""
        return f"The definition of {self.name} (linear_ref) multiplies, in fp32."

    def linear_int8_ref(self, x: QuantizedTokens, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """`linear_ref` of tokens [T, K] that are quantized already; with `int8_tokens` only."""
        raise NotImplementedError(f"{self.name} takes no int8 tokens")

    @abstractmethod
    def out_features(self, tensors: Sequence[Tensor]) -> int:
        """N, from the run-time tensors."""
