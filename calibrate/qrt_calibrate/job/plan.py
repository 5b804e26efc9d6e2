"""A planned calibration: checkpoint, architecture and the grid of each Linear, checked before the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qrt.arch import Arch
from qrt.arch.pooling import read_model
from qrt.definitions.names import place_names, unread
from qrt.errors import CheckpointError, ConfigError, UnsupportedError
from qrt.model_files.folder import read_config
from qrt.model_files.location import model_folder
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.checkpoint.compressed_tensors import targets_of
from qrt.quant.checkpoint.format import FLOATS
from qrt.quant.checkpoint.reader import quantization_entry
from qrt.quant.module_names import HEAD, REGEX, inside_pattern
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate.job.calibrated import uncalibrated, untrained
from qrt_calibrate.job.names import check_stored
from qrt_calibrate.model.decoded import DecodedCheckpoint
from qrt_calibrate.model.spelled import SpelledCheckpoint, spelled_out
from qrt_calibrate.model.untie import UntiedCheckpoint
from qrt_calibrate.recipe.groups import check_groups, choose_groups
from qrt_calibrate.recipe.method import Scales
from qrt_calibrate.recipe.recipe import LinearRecipe, Recipe
from qrt_calibrate.recipe.selection import matched, select
from qrt_calibrate.rounding.rtn import round_weight
from qrt_calibrate.tuning.training import Training


@dataclass(frozen=True)
class Job:
    """One calibration.

    checkpoint  the source; with a head of its own if the head is rounded
    devices     devices that compute: the first one rounds, all share the windows
    grids       grid of every Linear in the layers by full name ("model.layers.0.self_attn.q_proj"), None
                where it stays unquantized
    notes       choices that `plan` made because the user left them open, for the screen and the report
    """

    checkpoint: Checkpoint
    arch: Arch
    recipe: Recipe
    devices: tuple[torch.device, ...]
    grids: dict[str, LinearRecipe | None]
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """The device that rounds."""
        return self.devices[0]

    @property
    def scale_dtype(self) -> torch.dtype:
        """The model's dtype, to which loaders cast every scale."""
        dtype: torch.dtype = getattr(torch, self.arch.dtype)
        return dtype

    @property
    def quantized(self) -> dict[str, LinearRecipe]:
        """The Linears of the layers that are quantized."""
        return {name: grid for name, grid in self.grids.items() if grid is not None}

    @property
    def written(self) -> dict[str, LinearRecipe]:
        """Everything that is written quantized: `quantized`, and the head if it is rounded."""
        head = self.recipe.head
        return self.quantized if head is None else {**self.quantized, self.arch.names.head: head}

    @property
    def source(self) -> Checkpoint:
        """The checkpoint as it lies on disk."""
        return as_stored(self.checkpoint)

    @property
    def origin(self) -> str | None:
        """What the weights of the source are stored in; None where it is plain and says nothing else."""
        view = self.checkpoint
        while isinstance(view, UntiedCheckpoint | SpelledCheckpoint):
            view = view.base
        return view.origin if isinstance(view, DecodedCheckpoint) else None

    @property
    def num_weights(self) -> int:
        """Number of weights that the checkpoint stores."""
        return self.source.num_bytes // self.scale_dtype.itemsize

    @property
    def training(self) -> Training:
        """How `--tune` trains the whole model."""
        return Training.of(self.recipe, self.arch, self.num_weights, self.device)

    @property
    def ignored(self) -> list[str]:
        """Targets that mean what stays unquantized: Linears, routers, a head, and all that reads images."""
        routers = [
            f"{self.layer_name(index)}.{name}"
            for index in range(self.arch.num_layers)
            for name in self.arch.at(index).routers
        ]
        own = (HEAD, self.arch.names.head)  # some models of transformers know the head by the first alone
        head = () if self.recipe.head else dict.fromkeys(own)
        plain = (name for name, grid in self.grids.items() if grid is None)
        others = map(inside_pattern, unread(self.arch, self.checkpoint))
        return [*targets_of([*head, *routers, *plain]), *(REGEX + pattern for pattern in others)]

    @property
    def alike(self) -> list[list[int]]:
        """The numbers of the layers that have the same sizes: those with a mixture, and the others."""
        layers = self.arch.layers
        return [
            [index for index, layer in enumerate(layers) if layer.sparse is sparse]
            for sparse in sorted({layer.sparse for layer in layers})
        ]

    def layer_name(self, index: int) -> str:
        """Return the full name of layer `index`."""
        return f"{self.arch.names.layers}.{index}"

    def layer_grids(self, index: int) -> dict[str, LinearRecipe]:
        """Return the quantized Linears of layer `index`, by their names inside it, in fuse order."""
        prefix = f"{self.layer_name(index)}."
        return {n.removeprefix(prefix): grid for n, grid in self.quantized.items() if n.startswith(prefix)}


def source_folder(
    model: str | Path, *, revision: str | None = None, download_dir: str | Path | None = None
) -> Path:
    """Return the folder of the model to calibrate; a model that cannot be calibrated is not downloaded."""

    def check(folder: Path) -> None:
        config = read_config(folder)
        _architecture(config, folder)
        if not any(folder.glob("*.safetensors")):  # of the Hub: tensors, which would tell, are not there yet
            _expect_floats(quantization_entry(folder, config), model)

    return model_folder(model, revision=revision, download_dir=download_dir, check=check)


def plan(checkpoint: Checkpoint, recipe: Recipe, *devices: torch.device) -> Job:
    """Check everything that can be checked without reading weights."""
    checkpoint = as_stored(checkpoint)  # it may come from an earlier plan
    arch = _architecture(checkpoint.config, checkpoint.path)
    dtype = getattr(torch, arch.dtype, None)
    if dtype not in FLOATS:
        raise CheckpointError(
            f"{checkpoint.path}/config.json: expected dtype float16, bfloat16 or float32, "
            f"got {arch.dtype!r}; save the model in one of them"
        )
    if checkpoint.entry:
        checkpoint = DecodedCheckpoint(checkpoint, dtype)
    arch = place_names(arch, checkpoint)
    source, stored = checkpoint, arch
    checkpoint, arch = spelled_out(checkpoint, arch)
    recipe = _for_experts(recipe, arch)
    if any(recipe.windows) and recipe.seqlen > arch.max_position:
        raise ConfigError(
            f"--seqlen: expected at most the model's {arch.max_position}, got {recipe.seqlen}; lower it"
        )
    others = {name.rpartition(".")[0] for name in checkpoint.names()} | {*unread(arch, checkpoint)}
    recipe, notes = choose_groups(checkpoint, matched(arch, recipe, others), recipe)
    grids = select(arch, recipe, others)
    if recipe.head:
        _check_head(arch)
        checkpoint, arch = UntiedCheckpoint(checkpoint, arch), replace(arch, tied_embeddings=False)
    job = Job(checkpoint, arch, recipe, devices, grids, notes)
    check_groups(checkpoint, job.grids)
    check_stored(source, stored)
    if recipe.tune and (fact := untrained(arch)) is not None:
        raise UnsupportedError(f"--tune: not known for {arch.name}'s {fact}; leave it out")
    if recipe.tune and job.origin is not None:
        raise UnsupportedError(
            f"--tune: expected a checkpoint without a quantization_config, got {job.origin}; leave it out"
        )
    for grid in set(job.quantized.values()):
        _check_grid(grid, recipe, job.scale_dtype)
        if recipe.tune and WEIGHT_SCHEMES[grid.scheme].int8_tokens:
            raise ConfigError(f"--tune: expected a weight-only scheme, got {grid.scheme}; leave it out")
    return job


def _check_head(arch: Arch) -> None:
    """Raise UnsupportedError for a model whose head cannot be quantized."""
    if arch.headless:
        raise UnsupportedError(
            f"--head-bits: expected a model with a head of its vocabulary, got {arch.name}, which pools; "
            "leave it out"
        )
    if arch.unit_head or arch.names.head != HEAD:
        why = "normalizes its rows" if arch.unit_head else f"calls it {arch.names.head}"
        raise UnsupportedError(
            f"--head-bits: expected a head that other engines read quantized, got {arch.name}, which "
            f"{why}; leave it out"
        )


def _expect_floats(entry: Mapping[str, Any], model: object) -> None:
    """Raise UnsupportedError for a quantization_config that means integers, or is none that qrt reads."""
    groups = entry.get("config_groups")
    weights = [own.get("weights") for own in groups.values()] if isinstance(groups, dict) else []
    floats = [own for own in weights if isinstance(own, dict) and own.get("type") == "float"]
    method = entry.get("quant_method")
    if method in (None, "fp8", "mxfp4") or floats and len(floats) == len(weights):
        return
    raise UnsupportedError(
        f"{model}: quantization_config: expected 16-bit, fp8 or MXFP4 weights, got {method}, already "
        "quantized; calibrate the unquantized model it was made from. Where its weights are 16-bit all "
        "the same, download it and give the folder"
    )


def _architecture(config: Mapping[str, Any], folder: Path) -> Arch:
    """Return the architecture that a config.json names; UnsupportedError for one that is not calibrated."""
    arch = read_model(config, folder)
    if (fact := uncalibrated(arch)) is not None:
        raise UnsupportedError(f"{arch.name}: qrt-calibrate does not know its {fact}; llm-compressor may")
    return arch


def as_stored(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint that a job's was made from."""
    while isinstance(checkpoint, UntiedCheckpoint | SpelledCheckpoint | DecodedCheckpoint):
        checkpoint = checkpoint.base
    return checkpoint


def _for_experts(recipe: Recipe, arch: Arch) -> Recipe:
    """Return the recipe with a mixture's default, no zero points, if there are experts.

    UnsupportedError for settings that a mixture of experts does not have, ConfigError for those that others
    do not have.
    """
    if arch.experts is None:
        if recipe.moe_calibrate_all_experts:
            raise ConfigError(
                f"--moe-calibrate-all-experts: expected a mixture of experts, got {arch.name}; leave it out"
            )
        return recipe
    unknown = {
        "--tune": recipe.tune > 0,
        "--target-bits": recipe.target_bits is not None,
        "--max-size": recipe.max_size is not None,
    }
    for flag, given in unknown.items():
        if given:
            raise UnsupportedError(f"{flag}: not for {arch.name}, a mixture of experts; leave it out")
    if recipe.zeros_asked:
        return recipe
    return replace(recipe, spec=replace(recipe.spec, symmetric=True))


def _check_grid(grid: LinearRecipe, recipe: Recipe, dtype: torch.dtype) -> None:
    """Refuse a grid that the scheme's kernels do not run, rather than when the result is served."""
    if recipe.rules.scales is Scales.SMOOTHQUANT and not WEIGHT_SCHEMES[grid.scheme].int8_tokens:
        raise ConfigError(
            f"--method {recipe.method}: expected a scheme that rounds activations, got {grid.scheme}; "
            "use awq-gptq"
        )
    sample = torch.zeros(1, 2 * (grid.spec.group_size or 128))
    WEIGHT_SCHEMES[grid.scheme].prepare(round_weight(sample, grid.spec, dtype), torch.device("cpu"), dtype)
