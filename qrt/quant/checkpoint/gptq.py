"""GPTQ's layout, as AutoGPTQ and GPTQModel write it (docs/checkpoint-formats.md#gptq).

Weights lie transposed:

    P.qweight  int32   [K*b/32, N]    u, a bit stream along K
    P.qzeros   int32   [K/G, N*b/32]  zeros, a bit stream along N; v1 stores them minus one
    P.scales   float16 [K/G, N]
    P.g_idx    int32   [K]            group of each input: k // G, or any order with `desc_act`
    P.bias     float16 [N]            where the Linear has one

v1 subtracts one from every zero with a single subtraction per 32-bit word, so a zero of 0 borrows from the
next field. One wrapping addition per word undoes that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.format import (
    FLOATS,
    REMEDY,
    CheckpointFormat,
    Plain,
    bias_of,
    group_count,
    order_of,
    setting,
)
from qrt.quant.module_names import names_of
from qrt.quant.packing import WORD_BITS, pack, unpack
from qrt.quant.weight import weight_only
from qrt.quant.weight.base import WeightData

logger = logging.getLogger(__name__)

ONES = {4: 0x11111111, 8: 0x01010101}  # one in every field of a word
VERSIONS = {"gptq": 1, "gptq_v2": 2}


class Gptq(CheckpointFormat):
    """Read quant_method "gptq".

    Reads AutoGPTQ's quantize_config.json and marlin flag too, and GPTQModel's `dynamic` rules and its newer
    name of `checkpoint_format`.
    """

    def __init__(self, config: Mapping[str, Any], tensors: TensorFolder) -> None:
        self._where = f"{tensors.path}: quantization_config"
        version = str(config.get("checkpoint_format") or config.get("format") or "gptq")
        version = "marlin" if config.get("is_marlin_format") else version
        if version not in VERSIONS:
            raise UnsupportedError(
                f"{self._where}.checkpoint_format: expected {' or '.join(VERSIONS)}, got {version!r}, "
                "another layout of the words; quantize again in one of them, or with qrt-calibrate"
            )
        if config.get("pack_dtype", "int32") != "int32":
            raise UnsupportedError(
                f"{self._where}.pack_dtype: expected 'int32', got {config['pack_dtype']!r}; {REMEDY}"
            )
        self._minus_one = VERSIONS[version] == 1
        self._config = config
        self._rules = _rules(self._where, config.get("dynamic") or {})
        meta = config.get("meta") or {}
        if not isinstance(meta, Mapping):
            raise CheckpointError(f"{self._where}.meta: expected an object, got {meta!r}")
        writer = str(meta.get("quantizer") or "")
        if self._minus_one and config.get("sym") is False and "gptqmodel" not in writer:
            logger.warning(
                "%s: asymmetric GPTQ v1 that does not name GPTQModel as its writer: zero points of 0 may be "
                "damaged in the file itself; compare its perplexity with the original's",
                tensors.path,
            )

    def linear(self, tensors: TensorFolder, module: str) -> tuple[str, WeightData]:
        """Decode `module` where it has packed words; unquantized where it has a plain weight."""
        if not tensors.has(f"{module}.qweight"):
            return Plain().linear(tensors, module)
        config = {**self._config, **self._overrides(module)}
        bits = setting(self._where, config, ("bits",))
        schemes = {width: name for width, name in weight_only().items() if width in ONES}
        if bits not in schemes:
            known = " or ".join(map(str, schemes))
            raise UnsupportedError(f"{self._where}: expected GPTQ with {known} bits, got {bits}; {REMEDY}")
        packed = f"*{bits}/{WORD_BITS}"
        sizes = tensors.sizes(f"{module}.qweight", f"K{packed} N", torch.int32)
        words, k = tensors.tensor(f"{module}.qweight", f"K{packed} N", torch.int32), sizes["K"]
        groups = group_count(tensors, module, setting(self._where, config, ("group_size",), -1), k)
        scales = tensors.tensor(f"{module}.scales", f"K/{k // groups} N", FLOATS, **sizes)
        zeros = tensors.tensor(f"{module}.qzeros", f"K/{k // groups} N{packed}", torch.int32, **sizes)
        codes = unpack(words, bits, len(tensors.inputs(k)), axis=0)
        perm = order_of(tensors, f"{module}.g_idx", groups, k)
        data = WeightData(
            (codes if perm is None else codes[perm]).T.contiguous(),
            scales.T.contiguous(),
            self._zero(tensors, module, zeros, bits, scales.shape[1], bool(config.get("sym", True))),
            perm,
            bias=bias_of(tensors, module, sizes["N"]),
            bits=bits,
        )
        return schemes[bits], data

    def _zero(
        self, tensors: TensorFolder, module: str, words: Tensor, bits: int, n: int, symmetric: bool
    ) -> Tensor | None:
        """Return zero points uint8 [N, K/G]; None where all are the midpoint of a symmetric checkpoint."""
        if self._minus_one:
            words = words + ONES[bits]  # int32: wraps
        zero = unpack(words, bits, n).T.contiguous()
        if not symmetric:
            return zero
        if not (zero == 1 << (bits - 1)).all():
            raise CheckpointError(
                f"{tensors.path}: {module}.qzeros holds zero points, but its config says sym; "
                "checkpoint_format may be wrong (gptq stores zeros minus one, gptq_v2 as they are)"
            )
        return None

    def _overrides(self, module: str) -> Mapping[str, Any]:
        """Return what the first rule of `dynamic` that matches a name of `module` changes."""
        names = names_of(module)
        return next((changes for rule, changes in self._rules if any(map(rule.match, names))), {})


def _rules(where: str, dynamic: Any) -> list[tuple[re.Pattern[str], Mapping[str, Any]]]:
    """GPTQModel's `dynamic`: "+:<regex>" or "<regex>" to changed settings; "-:<regex>" is not quantized."""
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"{where}.dynamic: expected an object, got {dynamic!r}")
    rules: list[tuple[re.Pattern[str], Mapping[str, Any]]] = []
    for pattern, changes in dynamic.items():
        try:
            rules.append((re.compile(re.sub(r"^[+-]:", "", pattern)), dict(changes or {})))
        except (re.error, TypeError, ValueError):
            raise CheckpointError(f"{where}.dynamic: {pattern!r}: {changes!r} is not a rule") from None
    return rules


def encode(weight: WeightData) -> dict[str, Tensor]:
    """Encode a weight in version 2: its tensors by suffix, without the bias."""
    assert weight.scale is not None
    midpoint = 1 << (weight.bits - 1)
    zero = torch.full_like(weight.scale, midpoint, dtype=torch.uint8) if weight.zero is None else weight.zero
    k, groups = weight.in_features, weight.scale.shape[1]
    index = torch.arange(k) // (k // groups)
    values = weight.values
    if weight.perm is not None:
        back = torch.argsort(weight.perm)
        values, index = values[:, back], index[back]
    return {
        "qweight": pack(values.T, weight.bits, axis=0),
        "qzeros": pack(zero.T, weight.bits),
        "scales": weight.scale.T.half().contiguous(),
        "g_idx": index.to(torch.int32),
    }
