"""Before the work: the memory it will take, the size of the result, and where the result will not load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from qrt.arch import Arch
from qrt.quant.spec import TensorSpec
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate.estimate.sizes import (
    COUNTED,
    bits_per_weight,
    linear_weights,
    output_bytes,
    stored_bytes,
)
from qrt_calibrate.job.plan import Job
from qrt_calibrate.model.experts import EXPERT_BYTES
from qrt_calibrate.model.streams import stream_bytes
from qrt_calibrate.rounding.gptq import WALK_BYTES
from qrt_calibrate.steps.sensitivity import block_sizes, gradient_windows

PARALLEL = (2, 4, 8)  # tensor-parallel sizes that are checked
SHARE_BYTES = 10**9  # fewest weight bytes per GPU: with less, communication costs more than it gains
SPLIT_BY_INPUT = (".o_proj", ".down_proj", ".w2")  # the others are split by output
ZEROS_A_WORD = 32

Shapes = Mapping[str, tuple[int, ...]]  # of the weights of one layer, by names inside it


@dataclass(frozen=True)
class Preflight:
    """What a calibration takes and makes, before it runs.

    output_bytes        bytes of all tensors of the result
    bits_per_weight     bits per weight of the result, as the function of this name counts
    working_bytes       two fp32 copies of the largest layer, the moments of an input (the Hessian and two
                        shares of the drift) and the larger of two: the matrices of a factorization (three, on
                        a CPU two), or the factor and the weights that are rounded. Methods that couple rows
                        add the moments of a layer's outputs, a CPU the layer as stored and as it is written
    replica_bytes       bytes on each further device: the copies and the moments; 0 without one
    devices             number of devices, which divide hidden states and gradients
    hidden_bytes        hidden states, exact and rounded; on disk if RAM is short
    gradient_bytes      the loss's gradients at every layer's output; on disk if RAM is short
    tune_bytes          bytes that training the whole model takes
    findings            where the result will not load, and why
    """

    output_bytes: int
    bits_per_weight: float
    working_bytes: int
    replica_bytes: int
    devices: int
    hidden_bytes: int
    gradient_bytes: int
    tune_bytes: int
    findings: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the estimate as lines for the screen."""
        working, divided = _gigabytes(self.working_bytes), ""
        if self.replica_bytes:
            working += f" on the first device, {_gigabytes(self.replica_bytes)} on each other"
            divided = f", divided among {self.devices} devices"
        sizes = (
            f"output {_gigabytes(self.output_bytes)} ({self.bits_per_weight:.3f} {COUNTED}), working memory "
            f"{working} and hidden states {_gigabytes(self.hidden_bytes)} (in files where RAM is "
            f"short{divided})"
        )
        if self.gradient_bytes:
            sizes += f", gradients {_gigabytes(self.gradient_bytes)} (likewise)"
        if self.tune_bytes:
            sizes += f"; tuning, afterwards, {_gigabytes(self.tune_bytes)}"
        return [sizes, *(f"note: {finding}" for finding in self.findings)]


def preflight(job: Job) -> Preflight:
    """Estimate a job and find where its result will not load; no weight is read."""
    checkpoint, recipe, dtype = job.checkpoint, job.recipe, job.scale_dtype
    layers = [_layer(job, index) for index in range(job.config.num_layers)]
    weights = [sum(prod(spec.shape) for spec in layer) for layer in layers]
    stored = [sum(spec.num_bytes for spec in layer) for layer in layers]
    shapes = {
        name: checkpoint.spec(f"{job.layer_name(0)}.{name}.weight").shape for name in job.arch.projections
    }
    moments, beside = _stage_bytes(job.arch, shapes, job.device) if recipe.rules.needs_text else (0, 0)
    outputs = _output_moments(job.arch, shapes) if recipe.rules.rows else 0
    on_cpu = max(stored) + max(weights) if job.device.type == "cpu" else 0  # as read, and as codes
    replica = 2 * 4 * max(weights) + moments + outputs
    stream = partial(stream_bytes, seqlen=recipe.seqlen, hidden_size=job.config.hidden_size)
    size = output_bytes(checkpoint, job.written, dtype)
    return Preflight(
        output_bytes=size,
        bits_per_weight=bits_per_weight(checkpoint, job.grids, dtype),
        working_bytes=replica + beside + on_cpu,
        replica_bytes=replica if len(job.devices) > 1 and any(recipe.windows) else 0,
        devices=len(job.devices),
        hidden_bytes=2 * stream(sum(recipe.windows)),
        gradient_bytes=job.config.num_layers * stream(gradient_windows(recipe)),
        tune_bytes=_tune_bytes(job),
        findings=tuple(_findings(job, size)),
    )


def _tune_bytes(job: Job) -> int:
    """Return the bytes that training the whole model takes."""
    trained = linear_weights(job.checkpoint, job.quantized)
    others = job.num_weights - trained
    if job.recipe.head is not None:  # the rounded head beside the original
        others += linear_weights(job.checkpoint, [job.arch.head])
    return job.training.num_bytes(job.config, trained, others)


def _stage_bytes(arch: Arch, shapes: Shapes, device: torch.device) -> tuple[int, int]:
    """Return the most bytes that an input's moments take, and what its stage takes beyond that."""
    readers = {name for pair in arch.smooth if pair.source not in arch.projections for name in pair.readers}
    held = most = 0
    for fused, parts in arch.fuse:
        rows, inputs = sum(shapes[part][0] for part in parts), shapes[parts[0]][1]
        square = 4 * inputs**2
        moments = 3 * square
        if arch.is_expert(fused) and parts[0] not in readers:  # each expert has an input of its own
            rows //= len(parts)
            moments *= min(len(parts), max(1, EXPERT_BYTES // moments))
        elif parts[0] not in readers:
            moments = square + 2 * 4 * rows * inputs
        factors = (3 if device.type == "cuda" else 2) * square
        held = max(held, moments)
        most = max(most, moments + max(factors, square + WALK_BYTES * rows * inputs))
    return held, most - held


def _output_moments(arch: Arch, shapes: Shapes) -> int:
    """Return the bytes of the moments of all outputs in a layer; experts have none."""
    stacks = [parts for fused, parts in arch.fuse if not arch.is_expert(fused)]
    sizes = (size for parts in stacks for size in block_sizes(sum(shapes[part][0] for part in parts)))
    return 2 * 4 * sum(size**2 for size in sizes)


def _layer(job: Job, index: int) -> list[TensorSpec]:
    prefix = f"{job.layer_name(index)}."
    return [job.checkpoint.spec(name) for name in job.checkpoint.names() if name.startswith(prefix)]


def _findings(job: Job, size: int) -> list[str]:
    """Say where a result of `size` bytes will not load, and what else a user should know."""
    found = list(job.notes)
    if job.recipe.calib is not None and not any(job.recipe.windows):
        found.append(
            f"--calib is not read: --method {job.recipe.method} needs no text; --eval-samples N measures the "
            "cost on it"
        )
    found += _parallel_findings(job, size)
    if any(not grid.spec.symmetric and grid.spec.bits == 8 for grid in job.quantized.values()):
        found.append("vLLM runs 8-bit weights with zero points on Hopper only; --sym runs on all its GPUs")
    if any(WEIGHT_SCHEMES[grid.scheme].int8_tokens for grid in job.quantized.values()):
        found.append("transformers loads w8a8 and simulates it; its speed is vLLM's, SGLang's and qrt's")
    if job.arch.experts is not None:
        found += _mixture_findings(job)
    head = f"{job.arch.head}.weight"
    if job.checkpoint.has(head) and not job.source.has(head):
        assert job.recipe.head is not None
        own = stored_bytes(job.checkpoint.spec(head), job.recipe.head, job.scale_dtype)
        found.append(f"quantized, the head differs from the embedding: it is stored too, {_gigabytes(own)}")
    if job.recipe.head is not None:
        found.append(
            "vLLM before PR 37291 (March 2026) and SGLang before PR 35228 (August 2026) do not read a "
            "quantized head, SGLang without saying so; --head-bits 16 loads in all"
        )
    if job.config.tied_embeddings:
        found.append("the head is the embedding and stays unquantized")
    return found


def _parallel_findings(job: Job, size: int) -> list[str]:
    """Say over how many GPUs other engines cannot split a result of `size` bytes; only counts worth using."""
    reasons: dict[str, list[str]] = {}
    for count in PARALLEL:
        if size >= count * SHARE_BYTES and (reason := _split(job, count)):
            reasons.setdefault(reason, []).append(str(count))
    return [
        f"vLLM and SGLang cannot split it over {' or '.join(counts)} GPUs (tensor parallelism): {reason}"
        for reason, counts in reasons.items()
    ]


def _mixture_findings(job: Job) -> list[str]:
    """Return the findings for a mixture of experts.

    transformers reads all experts by the first grid of the file.
    """
    found = [f"routers ({', '.join(job.arch.routers)}) stay unquantized"]
    experts = {grid for name, grid in job.grids.items() if f".{job.arch.experts}." in name}
    if any(grid and not grid.spec.symmetric for grid in experts):
        found.append("transformers does not load experts with zero points; vLLM and SGLang do; --sym: all do")
    if experts != {job.recipe.grid}:
        found.append(
            "transformers loads experts wrong, and hardly says so, unless all of all layers are on the main "
            f"grid, {job.recipe.grid.describe()}; vLLM and SGLang read them as they are"
        )
    return [*found, f"qrt does not run {job.arch.name}; vLLM, SGLang and transformers do"]


def _split(job: Job, size: int) -> str | None:
    """Say why `size` GPUs cannot share the first Linear that they cannot share; None if they share all."""
    if job.config.num_heads % size or job.config.num_kv_heads % size and size % job.config.num_kv_heads:
        return f"{job.config.num_heads} query and {job.config.num_kv_heads} KV heads"
    for name, grid in job.quantized.items():
        out_features, in_features = job.checkpoint.spec(f"{name}.weight").shape
        by_input = name.endswith(SPLIT_BY_INPUT)
        group = grid.spec.group_size or 1
        if by_input and in_features % (size * group):
            return f"{name} has {in_features} inputs in groups of {group}"
        packed = 1 if grid.spec.symmetric else ZEROS_A_WORD // grid.spec.bits
        if not by_input and out_features % (size * packed):
            return f"{name} has {out_features} outputs, whose zero points lie {packed} to a word"
    return None


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
