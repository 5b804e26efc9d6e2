"""Before the work: the memory it will take, the size of the result, and where the result will not load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from qrt.arch import Arch
from qrt_calibrate.estimate.findings import findings
from qrt_calibrate.estimate.sizes import COUNTED, bits_per_weight, gigabytes, linear_weights, output_bytes
from qrt_calibrate.job.plan import Job
from qrt_calibrate.model.streams import stream_bytes
from qrt_calibrate.rounding.gptq import WALK_BYTES
from qrt_calibrate.steps.experts import chunk
from qrt_calibrate.steps.sensitivity import block_sizes, gradient_windows

Shapes = Mapping[str, tuple[int, ...]]  # shapes of one layer's weights, by names inside it


@dataclass(frozen=True)
class Estimate:
    """What a calibration takes and makes, before it runs.

    output_bytes        bytes of all tensors of the result
    bits_per_weight     bits per weight of the result, as the function of this name counts
    working_bytes       two fp32 copies of the largest layer and the larger of two: the moments of an input
                        (the Hessian and two shares of the drift) and the matrices of a factorization (three,
                        on a CPU two), or the factor and the weights that are rounded. Methods that couple
                        rows add the moments of outputs; besides there is the layer as stored, and its codes.
                        Experts have moments, factors and weights of their own, so many as EXPERT_BYTES hold;
                        a third copy of the layer counts if it takes more than all this
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
        working, divided = gigabytes(self.working_bytes), ""
        if self.replica_bytes:
            working += f" on the first device, {gigabytes(self.replica_bytes)} on each other"
            divided = f", divided among {self.devices} devices"
        sizes = (
            f"output {gigabytes(self.output_bytes)} ({self.bits_per_weight:.3f} {COUNTED}), working memory "
            f"{working} and hidden states {gigabytes(self.hidden_bytes)} (in files where RAM is "
            f"short{divided})"
        )
        if self.gradient_bytes:
            sizes += f", gradients {gigabytes(self.gradient_bytes)} (likewise)"
        if self.tune_bytes:
            sizes += f"; tuning, afterwards, {gigabytes(self.tune_bytes)}"
        return [sizes, *(f"note: {finding}" for finding in self.findings)]


def preflight(job: Job) -> Estimate:
    """Estimate a job and find where its result will not load; no weight is read."""
    checkpoint, recipe, dtype = job.checkpoint, job.recipe, job.scale_dtype
    layers = [_layer_bytes(job, alike[0]) for alike in job.alike]
    working, replica = (max(sizes) for sizes in zip(*layers, strict=True))
    stream = partial(stream_bytes, seqlen=recipe.seqlen, hidden_size=job.arch.hidden_size)
    size = output_bytes(checkpoint, job.written, dtype)
    return Estimate(
        output_bytes=size,
        bits_per_weight=bits_per_weight(checkpoint, job.grids, dtype),
        working_bytes=working,
        replica_bytes=replica if len(job.devices) > 1 and any(recipe.windows) else 0,
        devices=len(job.devices),
        hidden_bytes=2 * stream(sum(recipe.windows)),
        gradient_bytes=job.arch.num_layers * stream(gradient_windows(recipe)),
        tune_bytes=_tune_bytes(job),
        findings=tuple(findings(job, size)),
    )


def _tune_bytes(job: Job) -> int:
    """Return the bytes that training the whole model takes."""
    trained = linear_weights(job.checkpoint, job.quantized)
    others = job.num_weights - trained
    if job.recipe.head is not None:  # the rounded head beside the original
        others += linear_weights(job.checkpoint, [job.arch.names.head])
    return job.training.num_bytes(job.arch, trained, others)


def _layer_bytes(job: Job, index: int) -> tuple[int, int]:
    """Return the bytes that layer `index` takes on the first device, and on each other."""
    arch, checkpoint, rules, name = (
        job.arch.at(index),
        job.checkpoint,
        job.recipe.rules,
        job.layer_name(index),
    )
    tensors = [checkpoint.spec(full) for full in checkpoint.names() if full.startswith(f"{name}.")]
    weights, stored = sum(prod(spec.shape) for spec in tensors), sum(spec.num_bytes for spec in tensors)
    shapes = {part: checkpoint.spec(f"{name}.{part}.weight").shape for part in arch.projections}
    every = job.recipe.moe_calibrate_all_experts
    moments, beside = _stage_bytes(arch, shapes, job.device, every) if rules.needs_text else (0, 0)
    outputs = _output_moments(arch, shapes) if rules.rows else 0
    replica = 2 * 4 * weights + moments + outputs
    beside += stored  # as read
    codes = weights  # a byte each
    copies = 3 * 4 * weights if any(job.recipe.windows) else 0  # at the end: exact, rounded, and to nearest
    return max(replica + beside, copies + stored) + codes, replica


def _stage_bytes(arch: Arch, shapes: Shapes, device: torch.device, every: bool) -> tuple[int, int]:
    """Return the most bytes that inputs' moments take, and what a stage takes beyond that.

    Moments are freed before weights are rounded.
    `every` expert is calibrated with all tokens, so that their first Linears have one input.
    """
    readers = arch.readers
    held = most = 0
    for fused, parts in arch.fuse:
        rows, inputs = sum(shapes[part][0] for part in parts), shapes[parts[0]][1]
        square = 4 * inputs**2
        moments, count = 3 * square, 1
        if arch.experts is not None and arch.is_expert(fused) and not (every and parts[0] in readers):
            rows //= arch.experts.count
            count = chunk(arch.experts.count, inputs)
        elif parts[0] not in readers:
            moments = square + 2 * 4 * rows * inputs
        factorizing = count * moments + (count - 1) * square + (3 if device.type == "cuda" else 2) * square
        held = max(held, count * moments)
        walking = count * square + WALK_BYTES * count * rows * inputs
        most = max(most, factorizing, walking)
    return held, most - held


def _output_moments(arch: Arch, shapes: Shapes) -> int:
    """Return the bytes of the moments of all outputs in a layer; experts have none."""
    stacks = [parts for fused, parts in arch.fuse if not arch.is_expert(fused)]
    sizes = (size for parts in stacks for size in block_sizes(sum(shapes[part][0] for part in parts)))
    return 2 * 4 * sum(size**2 for size in sizes)
