"""Where the result of a calibration will not load, and what else a user should know before the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate.estimate.sizes import gigabytes, stored_bytes
from qrt_calibrate.job.plan import Job
from qrt_calibrate.model.untie import UntiedCheckpoint
from qrt_calibrate.recipe.recipe import LinearRecipe

PARALLEL = (2, 4, 8)  # tensor-parallel sizes that are checked
SHARE_BYTES = 10**9  # fewest weight bytes per GPU: with less, communication costs more than it gains
WORD_BITS = 32  # zero points are packed in words of so many bits


def findings(job: Job, size: int) -> list[str]:
    """Say where a result of `size` bytes will not load, and what else a user should know."""
    found = list(job.notes)
    if job.origin is not None:
        found.append(f"the source has {job.origin}; what they mean counts as exact, in {job.arch.dtype}")
    if job.recipe.calib is not None and not any(job.recipe.windows):
        found.append(
            f"--calib is not read: --method {job.recipe.method} needs no text; --eval-samples N measures the "
            "cost on it"
        )
    found += _parallel(job, size)
    if any(not grid.spec.symmetric and grid.spec.bits == 8 for grid in job.quantized.values()):
        found.append("vLLM runs 8-bit weights with zero points on Hopper only; --sym runs on all its GPUs")
    rounding = sorted({grid.scheme for grid in job.quantized.values() if _rounds_tokens(grid)})
    if job.arch.experts is None:
        found += [f"transformers only simulates {scheme}, slowly; {_runs(scheme)}" for scheme in rounding]
    if job.arch.experts is not None:
        found += _mixture(job)
    head = f"{job.arch.names.head}.weight"
    if isinstance(job.checkpoint, UntiedCheckpoint) and job.checkpoint.adds_head:
        assert job.recipe.head is not None
        own = stored_bytes(job.checkpoint.spec(head), job.recipe.head, job.scale_dtype)
        found.append(f"the quantized head is stored beside the embedding and takes {gigabytes(own)}")
    if job.recipe.head is not None:
        found.append(
            "vLLM before PR 37291 (March 2026) and SGLang before PR 35228 (August 2026) do not read a "
            "quantized head, SGLang without saying so; --head-bits 16 loads in all"
        )
    if job.arch.tied_embeddings:
        found.append("the head is the embedding and stays unquantized")
    return found


def _parallel(job: Job, size: int) -> list[str]:
    """Say over how many GPUs other engines cannot split a result of `size` bytes; only counts worth using."""
    reasons: dict[str, list[str]] = {}
    weights = [
        (name, job.checkpoint.spec(f"{name}.weight").shape, grid) for name, grid in job.quantized.items()
    ]
    for count in PARALLEL:
        if size >= count * SHARE_BYTES and (reason := _split(job, weights, count)):
            reasons.setdefault(reason, []).append(str(count))
    return [
        f"vLLM and SGLang cannot split it over {' or '.join(counts)} GPUs (tensor parallelism): {reason}"
        for reason, counts in reasons.items()
    ]


def _mixture(job: Job) -> list[str]:
    """Return the findings for a mixture of experts.

    transformers reads all experts by the first grid of the file.
    """
    arch, main = job.arch, job.recipe.grid
    found = [f"routers ({', '.join(arch.routers)}) stay unquantized"]
    layers = [(f"{job.layer_name(index)}.", arch.at(index)) for index in range(arch.num_layers)]
    experts = {
        job.grids[f"{layer}{part}"]
        for layer, own in layers
        for part in own.projections
        if own.is_expert(part)
    }
    if not _stacks(job.checkpoint.config):
        found.append(
            "experts are written one by one, as qrt reads them; transformers does not for this architecture"
        )
        return found
    if rounding := sorted({grid.scheme for grid in experts if grid and _rounds_tokens(grid)}):
        here = "transformers loads no mixture of experts in"
        return [*found, *(f"{here} {scheme}; {_runs(scheme)}" for scheme in rounding)]
    if any(grid and not grid.spec.symmetric for grid in experts):
        found.append("transformers does not load experts with zero points; with --sym it does")
    if experts != {main}:
        found.append(
            "transformers loads experts wrong, almost without a warning, unless all of them are on the main "
            f"grid, {main.describe()}; qrt, vLLM and SGLang read them right"
        )
    return found


def _rounds_tokens(grid: LinearRecipe) -> bool:
    return WEIGHT_SCHEMES[grid.scheme].int8_tokens


def _runs(scheme: str) -> str:
    """Say which engines run a scheme that rounds tokens to int8."""
    spec = WEIGHT_SCHEMES[scheme].spec
    if spec is not None and spec.progressive:
        return "qrt runs it fast, vLLM reads it without zero points (--sym), and SGLang does not"
    return "vLLM, SGLang and qrt run it fast"


def _stacks(config: Mapping[str, Any]) -> bool:
    """Return whether transformers reads experts that are stored one by one, and stacks them."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # takes seconds
    from transformers.core_model_loading import MergeModulelist

    nested = config.get("text_config")
    kinds = [part.get("model_type") for part in (config, nested) if isinstance(part, dict)]
    conversions = [own for kind in kinds if kind for own in get_checkpoint_conversion_mapping(kind) or ()]
    operations = [step for own in conversions for step in getattr(own, "operations", ())]
    return any(isinstance(step, MergeModulelist) for step in operations)


def _split(job: Job, weights: Sequence[tuple[str, tuple[int, ...], LinearRecipe]], size: int) -> str | None:
    """Say why `size` GPUs cannot share the first Linear that they cannot share; None if they share all."""
    config = job.arch
    if config.num_heads % size or config.num_kv_heads % size and size % config.num_kv_heads:
        return f"{config.num_heads} query and {config.num_kv_heads} KV heads"
    kinds = [job.arch.at(alike[0]) for alike in job.alike]
    ends = tuple({f".{name}": None for own in kinds for name in own.projections if name not in own.readers})
    for name, (out_features, in_features), grid in weights:
        by_input = name.endswith(ends)  # the others are split by output
        group = grid.spec.group_size or 1
        if by_input and in_features % (size * group):
            return f"{name} has {in_features} inputs in groups of {group}"
        packed = 1 if grid.spec.symmetric else WORD_BITS // grid.spec.bits
        if not by_input and out_features % (size * packed):
            return f"{name} has {out_features} outputs, whose zero points lie {packed} to a word"
    return None
