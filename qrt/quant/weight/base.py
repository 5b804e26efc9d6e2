"""The base of weight schemes, and the one struct that readers, calibrator and schemes exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from qrt.quant import affine, e2m1
from qrt.quant.spec import Codes, QuantSpec
from qrt.quant.tokens import QuantizedTokens


@dataclass(frozen=True)
class WeightData:
    """The weight of one Linear in canonical form, whatever checkpoint format it came from.

    values  [N, K]  codes uint8 0..2^b-1, or the weight itself (fp16/bf16/fp32) when unquantized
    scale   [N, K/G] in the model dtype, of e2m1 codes in bf16; None when unquantized
    zero    [N, K/G] uint8; None when symmetric (the zero is then 2^(b-1)), unquantized, or e2m1
    perm    [K] int64; column j of `values` multiplies input perm[j] (GPTQ act-order); None = identity. Of a
            part of the inputs K may be more than there are: some columns are then padding, which is 0
    bias    [N] in the model dtype, or None
    bits    code width; 0 when unquantized
    codes   what codes stand for
    """

    values: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    perm: Tensor | None = None
    bias: Tensor | None = None
    bits: int = 0
    codes: Codes = Codes.INTEGERS

    def __post_init__(self) -> None:
        assert self.codes is Codes.INTEGERS or self.zero is None, "e2m1 codes have no zero points"

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        """Return K."""
        return self.values.shape[1]

    @property
    def grid(self) -> tuple[object, ...]:
        """Return what weights in one tensor share: bits, kind of codes, groups of a row, and symmetry."""
        groups = None if self.scale is None else self.scale.shape[1]
        return self.bits, self.codes, groups, self.zero is None

    def rows(self, order: Tensor) -> WeightData:
        """Return the weight with row order[i] as row i; all that belongs to a row moves with it."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[order]

        scale, zero, bias = (moved(tensor) for tensor in (self.scale, self.zero, self.bias))
        return replace(self, values=self.values[order], scale=scale, zero=zero, bias=bias)

    def dequantize(self) -> Tensor:
        """Return the weight as fp32 [N, inputs], columns in input order."""
        if self.scale is None:
            return self.values.float()
        if self.codes is Codes.E2M1:
            weight = affine.decode_groups(e2m1.numbers(self.values), self.scale, 0.0)
        else:
            weight = affine.dequantize(self.values, self.scale, self.zero, self.bits)
        if self.perm is None:
            return weight
        return weight.new_zeros(len(weight), int(self.perm.max()) + 1).index_add_(1, self.perm, weight)


def fuse(parts: Sequence[WeightData]) -> WeightData:
    """Stack weights that read the same input along N (q, k, v or gate, up).

    Raises ValueError where they differ in bits, kind of codes, number of groups, symmetry or permutation.
    """
    first = parts[0]
    if any(_kind(part) != _kind(first) for part in parts):
        raise ValueError("parts of a fused Linear differ in bits, codes, groups, symmetry or permutation")
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
        first.codes,
    )


def _kind(part: WeightData) -> tuple[object, ...]:
    """Return what all parts of a fused weight must share."""
    return *part.grid, None if part.perm is None else part.perm.tolist()


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Return the tensors that are there, stacked; None where none is."""
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(found) if found else None


class Layout(Enum):
    """How a weight lies on the device. A kernel reads one layout."""

    PLAIN = "the weight [N, K] in the model's dtype"
    TILES = "codes in a `qrt.quant.weight.tiles.TiledWeight`"
    INT8_ROWS = "codes int8 [N, K], scale fp32 [N], arrivals int32 [N]"
    OWN = "known to the scheme alone, whose definition multiplies"


class WeightScheme(ABC):
    """How one Linear's weight is stored on the device and multiplied.

    A scheme is a stateless object in WEIGHT_SCHEMES. Its run-time tensors are a tuple in a fixed order, which
    the docstring of the scheme gives; `qrt::linear` hands them back to it.

    name          what checkpoints, flags and reports say
    spec          default grid of the weight; None when unquantized
    layout        how the run-time tensors lie
    int8_tokens   whether it quantizes x token by token, and also takes QuantizedTokens
    stored        name of compressed-tensors for how its codes lie in a file; None: no file holds them
    head          scheme of an int8 head behind layers in this one; None: the head stays unquantized
    method        default method of the calibrator; None: it does not make this scheme
    """

    name: ClassVar[str]
    spec: ClassVar[QuantSpec | None]
    layout: ClassVar[Layout] = Layout.OWN
    int8_tokens: ClassVar[bool] = False
    stored: ClassVar[str | None] = None
    head: ClassVar[str | None]
    method: ClassVar[str | None]

    @abstractmethod
    def prepare(self, weight: WeightData, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Repack a canonical weight for the kernels: return its run-time tensors on `device`.

        `dtype` is the model's. Raises UnsupportedError for a grid that the kernels do not run.
        """

    def prepare_cpu(self, weight: WeightData, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the run-time tensors of a canonical weight on the CPU.

        They are laid out for one of torch's own products where it has a fast one for this weight in `dtype`,
        else as `prepare` does it.
        """
        return self.prepare(weight, torch.device("cpu"), dtype)

    @abstractmethod
    def linear_ref(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """Multiply x [T, K] by the definition, in fp32: [T, N] in x's dtype. Tests take it as the truth."""

    def linear_cpu(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """Do as `linear_ref` on the CPU, with tensors of `prepare_cpu` or of `prepare`.

        It runs torch's product or, where there is none, the reference.
        """
        return self.linear_ref(x, tensors, bias)

    def explain_cpu(self, tensors: Sequence[Tensor]) -> str:
        """Return in a sentence what multiplies such tensors in `linear_cpu`."""
        return f"The definition of {self.name} (linear_ref) multiplies, in fp32."

    def linear_int8_ref(self, x: QuantizedTokens, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """Do as `linear_ref` with tokens [T, K] that are quantized already; needs `int8_tokens`."""
        raise NotImplementedError(f"{self.name} takes no int8 tokens")

    @abstractmethod
    def out_features(self, tensors: Sequence[Tensor]) -> int:
        """Return N, from the run-time tensors."""
