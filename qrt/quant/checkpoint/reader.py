"""Open a Hugging Face checkpoint folder; hand out tensors by name and Linear weights in canonical form."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from qrt.errors import CheckpointError, UnsupportedError
from qrt.model_files.folder import SEPARATE_CONFIGS, is_file, read_config, read_json, stated_quantization
from qrt.model_files.location import model_folder
from qrt.quant.checkpoint.compressed_tensors import check_transforms
from qrt.quant.checkpoint.cut import Cut, Slices
from qrt.quant.checkpoint.folder import MISMATCH, WEIGHT, ExpertTensors, TensorFolder
from qrt.quant.checkpoint.format import (
    FLOATS,
    FP8,
    REMEDY,
    CheckpointFormat,
    Plain,
    bias_of,
    codes_of,
    holds_codes,
    is_finite,
    is_plain,
    left_over,
)
from qrt.quant.checkpoint.shard import ShardFile
from qrt.quant.spec import QuantSpec
from qrt.quant.weight.base import WeightData
from qrt.registry import Registry

logger = logging.getLogger(__name__)

# quant_method -> class; one file and one line per format
FORMATS: Registry[Callable[[Mapping[str, Any], TensorFolder], CheckpointFormat]] = Registry(
    "quant_method",
    {
        "compressed-tensors": "qrt.quant.checkpoint.compressed_tensors:CompressedTensors",
        "awq": "qrt.quant.checkpoint.awq:AwqGemm",
        "gptq": "qrt.quant.checkpoint.gptq:Gptq",
        "fp8": "qrt.quant.checkpoint.fp8:Fp8",
        "mxfp4": "qrt.quant.checkpoint.mxfp4:Mxfp4",
    },
)
# Methods that round plain weights while the model runs
ROUNDED_LATER = ("bitnet",)
# Tensors without weights, which qrt does not read: RoPE frequencies and masks in old checkpoints; scales with
# which other engines round activations; scales with which they round q, the KV cache and the probabilities
# (compressed-tensors and vLLM: in self_attn(.attn); ModelOpt: in the projections; Quark).
UNREAD = re.compile(
    r".*([.]rotary(_pos)?_emb[.]inv_freq|[.](attn|attention)[.](masked_)?bias|[.](input|output|activation)_(scale|zero_point)"
    r"|[.]self_attn[.](\w+[.])?(q|k|v|kv|prob|prob_output)_(scale|zero_point))"
)


class Checkpoint(TensorFolder):
    """An opened checkpoint: config.json, an index of tensors over shards, lazily mapped safetensors.

    path            the folder
    config          config.json as a dict; without a dtype it gets that of the stored embedding
    entry           its quantization_config, or the separate file that holds it; empty where there is none
    quantization    the same; empty in a plain checkpoint, whose entry is left over
    """

    def __init__(self, path: Path, *, weights: bool = True) -> None:
        """Open the folder; without `weights` no tensor is looked for."""
        self.config: dict[str, Any] = read_config(path)
        self.entry = quantization_entry(path, self.config)
        super().__init__(path, None if weights else {})
        self._tensors_of: defaultdict[str, list[str]] = defaultdict(list)  # by module
        for name in self.stored_names():
            self._tensors_of[name.rpartition(".")[0]].append(name)
        if not (self.config.get("dtype") or self.config.get("torch_dtype")):
            self._add_dtype()
        self.quantization = {} if weights and self._is_left_over() else self.entry
        method = self.quantization.get("quant_method")
        if method is not None and method not in FORMATS:
            raise UnsupportedError(
                f"{path}: quant_method: expected one of {', '.join(FORMATS)}, got {method!r}; {REMEDY}"
            )
        self._format = Plain() if method is None else FORMATS[method](self.quantization, self)

    def _is_left_over(self) -> bool:
        """Return whether all weights are plain, though config.json has an entry about quantization."""
        method = self.entry.get("quant_method")
        if method is None or method in ROUNDED_LATER or holds_codes(self):
            return False
        if method == "compressed-tensors":
            check_transforms(self.path, self.entry)
        logger.warning(
            "%s: all weights are plain, so its quantization_config (%s) is left over and not read; delete it",
            self.path, method,
        )  # fmt: skip
        return True

    def _add_dtype(self) -> None:
        specs = [spec for name in self.stored_names() if (spec := self.spec(name)).dtype in FLOATS]
        if specs:  # the largest of them is the embedding, or of its dtype
            largest = max(specs, key=lambda spec: spec.num_bytes)
            self.config["dtype"] = str(largest.dtype).removeprefix("torch.")

    def linear(
        self, module: str, *, transposed: bool = False, cut: Cut | None = None, beside: Sequence[str] = ()
    ) -> tuple[str, WeightData]:
        """Return the scheme (a key of WEIGHT_SCHEMES) and the canonical weight of a Linear.

        `module` is for example "model.layers.0.self_attn.q_proj". Unquantized weights are mapped, codes are
        unpacked into memory. Raises CheckpointError and UnsupportedError as CheckpointFormat does, and for a
        tensor of the Linear that was not read and is not `beside` it (endings). If `transposed`, an
        unquantized weight is stored [K, N], as in transformers' Conv1D; tools store what they quantize of
        it as of any Linear.

        Of a `cut` only that part is read; CheckpointError where the whole has other sizes. InsideGroup where
        its inputs part what is stored as one. The cut of inputs that are out of order (`order`) is whole.
        """
        found, read = self._read(self, module, transposed, cut)
        self.expect_no_more(module, [*read, *(f"{module}.{ending}" for ending in beside)])
        return found

    def expert(
        self, stack: str, index: int, *, transposed: bool = False, cut: Cut | None = None
    ) -> tuple[str, WeightData]:
        """Return the scheme and the canonical weight of one of the experts that are stored as one tensor.

        `stack` is the name that their weights have, [E, N, K], or [E, K, N] if `transposed`, for example
        "model.layers.0.mlp.experts.gate_up_proj" or, of a module, "...input_linear.weight". Scales of fp8 lie
        as their weights do; packed codes are never transposed. Other tensors of the experts have longer names
        (`folder.ExpertTensors`). Nothing of the other experts is read, and of a `cut` only that part. Raises
        as `linear` does.
        """
        one = self.stack(stack, index)
        name = f"{one.module}.weight"
        if not (transposed and one.has(name) and one.spec(name).dtype in FP8):
            (scheme, weight), read = self._read(one, one.module, transposed, cut)
        else:
            beside: TensorFolder = one if cut is None else Slices(one, one.module, cut)
            bias = bias_of(beside, one.module, one.spec(name).shape[1])
            lone = one.without(f"{one.module}.bias")
            (scheme, weight), read = self._read(lone, one.module, False, None if cut is None else cut.turned)
            weight = replace(weight, values=weight.values.T.contiguous(), bias=bias)
            read = {*read, f"{one.module}.bias"}
        left = (name for name in one.names() if name not in read and not is_unread(name))
        self._refuse(map(one.name_in_messages, left))
        return scheme, weight

    def stack(self, stack: str, index: int = 0) -> ExpertTensors:
        """Return the tensors of expert `index` of those that are stored as `stack`; see `expert`."""
        near = *self._tensors_of[stack.rpartition(".")[0]], *self._tensors_of.get(stack, ())
        return ExpertTensors(self, stack, near, index)

    def order(self, module: str, expert: int | None = None) -> Tensor | None:
        """Return a Linear's inputs int64 [K] in the order of its codes; None where they come in that order.

        With `expert` it is that one of those that are stored as `module`.
        """
        tensors: TensorFolder = self
        if expert is not None:
            tensors = one = self.stack(module, expert)
            module = one.module
        for name in (f"{module}.g_idx", f"{module}.weight_g_idx"):
            if tensors.has(name) and (index := tensors.tensor(name)).dim() == 1 and (index.diff() < 0).any():
                return index.argsort(stable=True)
        return None

    def expect_experts(self, stack: str, count: int) -> None:
        """Raise CheckpointError if not `count` experts are stored as `stack`; see `expert`."""
        one = self.stack(stack, count - 1)
        for name in map(one.name_in_messages, one.names()):
            if (came := self.spec(name).shape[0]) != count:
                raise CheckpointError(
                    f"{self.path}: {name}: expected {count} experts, got {came}; {MISMATCH}"
                )

    def _read(
        self, tensors: TensorFolder, module: str, transposed: bool, cut: Cut | None
    ) -> tuple[tuple[str, WeightData], Collection[str]]:
        """Return the scheme and the weight of a Linear in `tensors`, and the names of what was read.

        What is left over beside a plain weight of a quantized checkpoint counts as read.
        """
        reading = Reading(tensors)
        view: TensorFolder = reading if cut is None else Slices(reading, module, cut)
        if transposed and tensors.has(f"{module}.weight"):
            return Plain().linear(view, module, transposed=True), reading.read
        if not is_plain(tensors, module):
            self._expect_method(tensors, module)
            found = self._format.linear(view, module)
            self._expect_finite(tensors, module, found[1])
            return found, reading.read
        left = left_over(tensors, module) if self.entry else []
        return Plain().linear(view, module), {*reading.read, *left}

    def _expect_method(self, tensors: TensorFolder, module: str) -> None:
        """Raise CheckpointError for codes of `module` if nothing says what they mean."""
        name = codes_of(tensors, module)
        if name is not None and not self.quantization:
            raise CheckpointError(
                f"{self.path}: {tensors.name_in_messages(name)}: expected {' or '.join(map(str, FLOATS))}, "
                f"got {tensors.spec(name).dtype}, but config.json has no quantization_config; download it "
                f"again, or {REMEDY}"
            )

    def _expect_finite(self, tensors: TensorFolder, module: str, weight: WeightData) -> None:
        """Raise CheckpointError where the codes or the scales of `module` mean NaN or infinity."""
        if not is_finite(weight.values if weight.scale is None else weight.scale):
            name = tensors.name_in_messages(codes_of(tensors, module) or f"{module}{WEIGHT}")
            raise CheckpointError(
                f"{self.path}: {name}: expected codes and scales of finite weights, got NaN or infinity; "
                "download the checkpoint again"
            )

    def expect_no_more(self, module: str, read: Collection[str]) -> None:
        """Raise CheckpointError for tensors of `module` not in `read`, which may change its meaning."""
        self._refuse(name for name in self._tensors_of[module] if name not in read)

    def _refuse(self, names: Iterable[str]) -> None:
        """Raise CheckpointError for those of these tensors that may change what the model computes."""
        if left := [name for name in names if not is_unread(name)]:
            raise CheckpointError(
                f"{self.path}: {', '.join(left)}: of no use to quant_method "
                f"{self.quantization.get('quant_method')!r}; {MISMATCH}"
            )

    def grid(self, module: str) -> tuple[str, QuantSpec | None]:
        """Return the scheme and the grid of a Linear (None: unquantized) by config.json alone.

        Raises UnsupportedError for a quant_method whose config does not tell.
        """
        return self._format.grid(module)


def is_unread(name: str) -> bool:
    """Return whether qrt computes the same without the tensor `name`."""
    return UNREAD.fullmatch(name) is not None


class Reading(TensorFolder):
    """A folder that notes the names of the tensors that are read."""

    def __init__(self, folder: TensorFolder) -> None:
        self.path, self._shard_of = folder.path, folder._shard_of
        self._folder = folder
        self.read: set[str] = set()

    def shard(self, name: str) -> ShardFile:
        self.read.add(name)
        return super().shard(name)

    def name_in_messages(self, name: str) -> str:
        return self._folder.name_in_messages(name)


def open_checkpoint(path: str | Path, *, weights: bool = True) -> Checkpoint:
    """Open a folder (or the bundled "tiny"), and check what can be checked without reading weights.

    Without `weights` the folder need not have any. Raises CheckpointError: no such folder, no config.json, no
    safetensors (says so when only .bin files are there), an index that names a missing shard or a path
    outside the folder, a link to a file that is gone, a truncated shard; UnsupportedError: a quant_method or
    a quantization_config that qrt does not read.
    """
    return Checkpoint(model_folder(path), weights=weights)


def quantization_entry(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization_config with its quant_method; empty where there is none."""
    entry = stated_quantization(config)
    entry = config.get("compression_config") if entry is None else entry  # old compressed-tensors
    if entry is None:
        file = next((file for file in SEPARATE_CONFIGS if is_file(path / file)), None)
        if file is None:
            return {}
        entry = {**read_json(path / file), "quant_method": SEPARATE_CONFIGS[file]}
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"{path}/config.json: expected quantization_config to be an object, got {entry!r}"
        )
    if not entry:
        return {}
    method = entry.get("quant_method")
    if method is None and "config_groups" in entry:  # which no other has
        method = "compressed-tensors"
    known = str(method).lower().replace("_", "-")
    return {**entry, "quant_method": known if known in FORMATS else str(method)}
