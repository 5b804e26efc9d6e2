"""A checkpoint of fp8 or MXFP4 codes as the plain weights that they mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.checkpoint.folder import WEIGHT, ExpertTensors, TensorFolder
from qrt.quant.checkpoint.format import LEFT_OVER, PACKED, CodeKind, codes_of, kind_of, shape_of
from qrt.quant.checkpoint.reader import is_unread
from qrt.quant.spec import TensorSpec
from qrt.quant.weight import WeightData

ENTRIES = ("quantization_config", "compression_config")
MOST = torch.finfo(torch.float16).max
OWN = ("weight", *PACKED, *LEFT_OVER)  # endings of tensors that hold a Linear, or are left over


class DecodedCheckpoint(Checkpoint):
    """A view of `base` without a quantization_config: codes are plain weights, in `dtype`, the model's.

    A weight is decoded when it is read. Scales that are left over beside plain weights are hidden. Experts
    that are stored as one tensor stay as they are stored; `SpelledCheckpoint` asks for each. Raises
    UnsupportedError for integers, which are rounded already.

    origin   what the weights are stored in, for reports
    """

    def __init__(self, base: Checkpoint, dtype: torch.dtype) -> None:
        self.path, self.base, self.entry, self.quantization = base.path, base, {}, {}
        self.config = without_entries(base.config)
        self._dtype = dtype
        self._beside: dict[str, list[str]] = {}  # by coded module, endings of its other tensors
        self._shard_of = {}
        for module, names in _by_module(base.stored_names()).items():
            kept = [name for name in names if _is_kept(name)]
            if expect_floats(base, module) is not None:
                self._beside[module] = [name.rpartition(".")[2] for name in kept]
                kept.append(f"{module}{WEIGHT}")
            elif base.has(plain := f"{module}{WEIGHT}"):
                kept.append(plain)
            else:
                kept = [name for name in names if not _is_scale(name)]
            codes = codes_of(base, module) or names[0]
            self._shard_of |= {name: base.shard(name if base.has(name) else codes) for name in kept}
        self.origin = _origin(base)

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of a tensor once it is decoded."""
        module, _, ending = name.rpartition(".")
        if module in self._beside and ending == "weight":
            return TensorSpec(shape_of(self.base, module), self._dtype)
        return self.base.spec(name)

    def tensor(self, name: str, *checks: Any, **sizes: Any) -> Tensor:
        """Return the tensor, decoded."""
        module, _, ending = name.rpartition(".")
        if module in self._beside and ending == "weight":
            return plain(
                self.path, name, self.base.linear(module, beside=self._beside[module])[1], self._dtype
            )
        return self.base.tensor(name, *checks, **sizes)

    def stack(self, stack: str, index: int = 0) -> ExpertTensors:
        """Return the tensors of an expert as they are stored."""
        return self.base.stack(stack, index)

    def expert(self, stack: str, index: int, **cut: Any) -> tuple[str, WeightData]:
        """Return one of the experts that are stored as one tensor."""
        return self.base.expert(stack, index, **cut)


def plain(path: Path, name: str, weight: WeightData, dtype: torch.dtype) -> Tensor:
    """Return a weight as plain numbers in `dtype`; CheckpointError where that does not hold them."""
    found = weight.values if weight.scale is None else weight.dequantize()
    if dtype == torch.float16 != found.dtype and (most := float(found.abs().max())) > MOST:
        raise CheckpointError(
            f"{path}: {name}: expected values that float16 holds, the dtype of config.json, got {most:.3g}; "
            "set dtype to bfloat16 there"
        )
    return found.to(dtype)


def without_entries(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without what it says about quantization, of its text half too."""
    found = {key: value for key, value in config.items() if key not in ENTRIES}
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = {key: value for key, value in text.items() if key not in ENTRIES}
    return found


def expect_floats(tensors: TensorFolder, module: str) -> CodeKind | None:
    """Return what the codes of `module` are, None where it is plain; UnsupportedError for integers."""
    kind = kind_of(tensors, module)
    if kind is CodeKind.INTEGERS and (name := codes_of(tensors, module)) is not None:
        raise UnsupportedError(
            f"{tensors.path}: {tensors.name_in_messages(name)}: expected 16-bit, fp8 or MXFP4 weights, got "
            "integers, already quantized; calibrate the unquantized model it was made from, or "
            "change its format with `qrt-calibrate convert`"
        )
    return kind


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each module's tensors."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _is_kept(name: str) -> bool:
    """Return whether a tensor stays as it is: no codes, no scales of weights, activations or K and V."""
    return name.rpartition(".")[2] not in OWN and not _is_scale(name)


def _is_scale(name: str) -> bool:
    """Return whether a tensor says how activations, or K and V, are rounded, which qrt never reads."""
    return is_unread(name) and name.endswith(("_scale", "_zero_point"))


def _origin(base: Checkpoint) -> str:
    """Return what the weights of `base` are stored in."""
    specs = ((name, base.spec(name).dtype) for name in base.stored_names())
    kinds = {
        CodeKind.FP8.value if dtype.itemsize == 1 and dtype.is_floating_point else CodeKind.MXFP4.value
        for name, dtype in specs
        if dtype.itemsize == 1
        and not name.endswith(LEFT_OVER)
        and (dtype.is_floating_point or _is_packed(name))
    }
    method = base.entry.get("quant_method")
    stored = " and ".join(sorted(kinds))
    return f"{stored} ({method})" if stored else f"plain weights under a left-over entry ({method})"


def _is_packed(name: str) -> bool:
    return name.endswith(("_packed", "_blocks"))
