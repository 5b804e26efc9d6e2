"""How numbers are quantized: bits, symmetry and groups of a grid, and shapes of tensors to be made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import gcd, prod

import torch

from qrt.errors import ConfigError

GROUP_SIZES = (128, 64, 32)  # default choices, from the usual size to the smallest that kernels run


class Codes(Enum):
    """What the codes of a weight stand for, before the scale."""

    INTEGERS = "code u is u minus a zero point"
    E2M1 = "floats of 4 bits: a sign, two bits of exponent, one of mantissa (`qrt.quant.e2m1`)"


class Granularity(Enum):
    """The weights that share a scale."""

    CHANNEL = "channel"  # one output row of a weight
    GROUP = "group"  # `group_size` consecutive inputs of one output row


@dataclass(frozen=True)
class QuantSpec:
    """A grid: codes 0..2^bits-1, and how many share a scale.

    Integers have the value (code - zero) * scale. Symmetric grids have no stored zero: it is 2^(bits-1). A
    grid of floats is symmetric. The group scales of a progressive one are steps of one scale a channel
    (`qrt.quant.progressive`).
    """

    bits: int
    symmetric: bool
    granularity: Granularity
    group_size: int | None = None
    codes: Codes = Codes.INTEGERS
    progressive: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"bits: expected 2 to 8, got {self.bits}")
        if (self.granularity is Granularity.GROUP) != (self.group_size is not None):
            expected = "a number" if self.granularity is Granularity.GROUP else "None"
            raise ConfigError(
                f"group_size: expected {expected} with {self.granularity.value} granularity, "
                f"got {self.group_size}"
            )
        if self.codes is Codes.E2M1 and (self.bits, self.symmetric) != (4, True):
            kind = "symmetric" if self.symmetric else "asymmetric"
            raise ConfigError(f"e2m1 codes: expected 4 bits without zero points, got {kind} {self.bits} bits")
        if self.progressive and (self.bits, self.codes) != (4, Codes.INTEGERS):
            raise ConfigError(f"progressive groups: expected 4-bit integers, got {self.bits} bits")
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError(f"group_size: expected a positive number, got {self.group_size}")

    @property
    def levels(self) -> int:
        """Number of codes."""
        return 1 << self.bits

    @property
    def midpoint(self) -> int:
        """The zero of a symmetric grid, and the offset between signed and stored codes."""
        return 1 << (self.bits - 1)

    def group_of(self, in_features: int, common: int | None = None) -> int:
        """Return the inputs per scale for a weight of `in_features`; ConfigError if groups do not divide it.

        The error suggests a size that also divides `common`.
        """
        group = self.group_size or in_features
        if in_features % group:
            suggested = _group_size_for(gcd(in_features, common or in_features))
            raise ConfigError(
                f"group size {group} does not divide {in_features} input features; "
                f"use {suggested} or leave the layer unquantized with --ignore"
            )
        return group


def largest_group(in_features: int) -> int | None:
    """Return the largest of GROUP_SIZES that divides `in_features`, None where none does."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), None)


def _group_size_for(in_features: int) -> str:
    size = largest_group(in_features)
    return (
        "group size -1 (one scale per channel)" if size is None else f"a group size that does (e.g. {size})"
    )


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that is still to be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def zeros(self, device: torch.device | str) -> torch.Tensor:
        """Return a zero tensor of this shape."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)
