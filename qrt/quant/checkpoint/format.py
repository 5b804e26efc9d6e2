"""The interface of checkpoint formats, which find and decode the weight of one Linear; and plain weights.

What a Linear's tensors hold, plain weights or codes, is told by their names and dtypes. They decide, not what
`quantization_config` says: tools leave the entry, and scales, beside weights that they turned into 16 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant import e2m1
from qrt.quant.checkpoint.folder import MISMATCH, WEIGHT, TensorFolder
from qrt.quant.spec import QuantSpec
from qrt.quant.weight.base import WeightData

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
REMEDY = "start from the unquantized model and quantize it with qrt-calibrate"


class CheckpointFormat(ABC):
    """One `quant_method`; made from `quantization_config` and the opened tensors of a folder."""

    @abstractmethod
    def linear(self, tensors: TensorFolder, module: str) -> tuple[str, WeightData]:
        """Return the scheme name (a key of WEIGHT_SCHEMES) and the canonical weight of `module`.

        Raises CheckpointError when a tensor is absent or does not fit, UnsupportedError for a layout that
        qrt does not read.
        """

    def grid(self, module: str) -> tuple[str, QuantSpec | None]:
        """Return scheme name and grid of `module` from the config; UnsupportedError if only tensors tell."""
        raise UnsupportedError(
            "load_format dummy: expected a plain or a compressed-tensors config.json, "
            f"got one of {type(self).__name__}, which does not say all"
        )


def bias_of(tensors: TensorFolder, module: str, out_features: int) -> Tensor | None:
    """Return the bias [N] of a Linear, or None where it has none."""
    name = f"{module}.bias"
    return tensors.tensor(name, "N", FLOATS, N=out_features) if tensors.has(name) else None


def setting(where: str, config: Mapping[str, Any], names: Sequence[str], default: int | None = None) -> int:
    """Return the whole number that a config has under one of `names`."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if type(value) is not int or value == 0 or value < -1:
        raise CheckpointError(
            f"{where}.{names[0]}: expected a positive number (or -1 for one group), got {value!r}"
        )
    return value


def block_of(where: str, entry: Any) -> tuple[int, int]:
    """Return the rows and columns of a block that a config names."""
    if not isinstance(entry, list) or len(entry) != 2 or any(type(n) is not int or n < 1 for n in entry):
        raise CheckpointError(f"{where}: expected two positive numbers, rows and columns, got {entry!r}")
    return entry[0], entry[1]


def group_count(tensors: TensorFolder, module: str, group_size: int, in_features: int) -> int:
    """Return the scales per output row for groups of `group_size` inputs; -1 means all inputs."""
    group = in_features if group_size == -1 else group_size
    if in_features == 0 or in_features % group:
        raise CheckpointError(
            f"{tensors.path}: {module}: group_size {group_size} does not divide its {in_features} input "
            f"features; {MISMATCH}"
        )
    return in_features // group


def order_of(tensors: TensorFolder, name: str, groups: int, in_features: int) -> Tensor | None:
    """Return the inputs int64 [K] in the order of their groups; None when they lie in that order.

    `name` is the tensor of each input's group. Tools that do not reorder leave it out, or write all zeros or
    all -1. Raises UnsupportedError for groups that differ in size.
    """
    if not tensors.has(name):
        return None
    index = tensors.tensor(name, "G", torch.int32, G=in_features).long()  # all of it, whatever is read
    if groups == 1 or not index.any() or (index == -1).all():
        return None
    if not torch.equal(index.sort().values, torch.arange(in_features) // (in_features // groups)):
        raise UnsupportedError(
            f"{tensors.path}: {name} does not name {groups} groups of {in_features // groups} inputs each; "
            f"{REMEDY}"
        )
    order = index.argsort(stable=True)
    return None if torch.equal(order, torch.arange(in_features)) else order


class Plain(CheckpointFormat):
    """Unquantized: every Linear is `P.weight` [N, K] and perhaps `P.bias` [N], as they are."""

    def linear(
        self, tensors: TensorFolder, module: str, *, transposed: bool = False
    ) -> tuple[str, WeightData]:
        """Return "fp16" and the weight in its stored dtype; if `transposed`, it is stored [K, N]."""
        weight = tensors.tensor(f"{module}.weight", "K N" if transposed else "N K", FLOATS)
        outputs = tensors.spec(f"{module}.weight").shape[1 if transposed else 0]
        weight = weight.T.contiguous() if transposed else weight
        return "fp16", WeightData(weight, bias=bias_of(tensors, module, outputs))

    def grid(self, module: str) -> tuple[str, QuantSpec | None]:
        """See CheckpointFormat."""
        return "fp16", None


FP8 = torch.float8_e4m3fn, torch.float8_e5m2
PACKED = ("weight_packed", "weight_blocks", "qweight")  # codes that are not called `weight`
SCALES = ("weight_scale", "weight_scale_inv", "scales")
# What belongs to codes, and means nothing beside a plain weight
LEFT_OVER = (*SCALES, "weight_zero_point", "weight_shape", "weight_g_idx", "qzeros", "g_idx", "input_scale")
CODES = (*FP8, torch.uint8, torch.int8, torch.int16, torch.int32)  # dtypes of codes; others are of buffers
ROWS = 64  # rows that tell whether a plain weight is one


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    ends = torch.aminmax(tensor) if tensor.numel() else ()  # copies nothing, unlike isfinite
    return all(bool(end.isfinite()) for end in ends)  # NaN is either end


class CodeKind(Enum):
    """What the codes of a Linear are."""

    FP8 = "fp8"
    MXFP4 = "MXFP4"
    INTEGERS = "integers"


def codes_of(tensors: TensorFolder, module: str) -> str | None:
    """Return the name of the tensor with the codes of `module`; None where its weight is plain, or absent."""
    for ending in PACKED:
        if tensors.has(name := f"{module}.{ending}"):
            return name
    name = f"{module}{WEIGHT}"
    return name if tensors.has(name) and tensors.spec(name).dtype in CODES else None


def kind_of(tensors: TensorFolder, module: str) -> CodeKind | None:
    """Return what the codes of `module` are; None where it has none."""
    name = codes_of(tensors, module)
    if name is None:
        return None
    dtype = tensors.spec(name).dtype
    if dtype in FP8:
        return CodeKind.FP8
    floats = name.endswith(PACKED[:2]) and dtype == torch.uint8
    return CodeKind.MXFP4 if floats else CodeKind.INTEGERS


def shape_of(tensors: TensorFolder, module: str) -> tuple[int, ...]:
    """Return the shape [N, K] of the weight that floating-point codes mean, or of a plain one."""
    name = codes_of(tensors, module) or f"{module}{WEIGHT}"
    shape = tensors.spec(name).shape
    if kind_of(tensors, module) is not CodeKind.MXFP4:
        return shape
    rows, *rest = shape
    return (rows, rest[0] * e2m1.GROUP) if name.endswith("_blocks") else (rows, rest[0] * 2)


def is_plain(tensors: TensorFolder, module: str) -> bool:
    """Return whether the weight of `module` is plain, whatever lies beside it."""
    name = f"{module}{WEIGHT}"
    return codes_of(tensors, module) is None and tensors.has(name) and tensors.spec(name).dtype in FLOATS


def left_over(tensors: TensorFolder, module: str) -> list[str]:
    """Return the names of what is left of codes beside the plain weight of `module`.

    CheckpointError where the weight is codes that were cast to 16 bits: it means nothing without its scales.
    """
    found = [name for ending in LEFT_OVER if tensors.has(name := f"{module}.{ending}")]
    if any(name.endswith(SCALES) for name in found):
        weight = tensors.tensor(f"{module}{WEIGHT}")[:ROWS].float()
        rounded = weight.round(), weight.clamp(-448, 448).to(FP8[0]).float()
        if weight.any() and any(torch.equal(weight, own) for own in rounded):
            raise CheckpointError(
                f"{tensors.path}: {tensors.name_in_messages(f'{module}{WEIGHT}')}: expected a weight, or "
                "codes in 8 bits, got codes cast to floats beside their scales; download the checkpoint "
                "again, or multiply them"
            )
    return found


def holds_codes(tensors: TensorFolder) -> bool:
    """Return whether any tensor may be codes: of an integer or fp8 dtype, and not left over."""
    found = (name for name in tensors.stored_names() if tensors.spec(name).dtype in CODES)
    return any(not name.endswith(LEFT_OVER) for name in found)
