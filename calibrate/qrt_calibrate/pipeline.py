"""From a checkpoint folder to a quantized one: read a layer, quantize it, write it, forget it."""

from __future__ import annotations

import time
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from qrt.arch import ARCHS, ModelConfig
from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import Checkpoint, open_checkpoint
from qrt.quant.checkpoint.writer import CheckpointWriter
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate.method import METHODS, Job, LayerResult
from qrt_calibrate.recipe import Recipe
from qrt_calibrate.report import LayerReport, Report
from qrt_calibrate.rtn import round_weight
from qrt_calibrate.selection import Selection, check_groups, select


def calibrate(model: str, recipe: Recipe, out: Path, device: torch.device) -> Report:
    """Quantize checkpoint `model` (a folder, or "tiny") into the new folder `out`.

    Memory: one decoder layer in fp32 with its temporaries, the hidden states of the calibration windows on
    the CPU (n_samples * seqlen * hidden size, fp32), and the output shard being filled. A failed or
    interrupted run leaves nothing behind. Raises QrtError for whatever a user can put right.
    """
    start = time.perf_counter()
    checkpoint = open_checkpoint(model)
    job, selection = plan(checkpoint, recipe, device)
    method = METHODS[recipe.method](job)
    layers: list[LayerReport] = []
    remaining = set(checkpoint.names())
    with CheckpointWriter(
        out,
        checkpoint,
        scheme=recipe.scheme,
        spec=recipe.spec,
        ignore=selection.ignored,
        metadata={**recipe.metadata(), **method.metadata},
    ) as writer:
        for index in tqdm(range(job.config.num_layers), desc="Calibrating", unit="layer"):
            began = time.perf_counter()
            name = job.layer_name(index)
            tensors = read_layer(checkpoint, name)
            result = method.quantize(index, tensors)
            _write_layer(writer, name, result)
            remaining -= {f"{name}.{tensor}" for tensor in tensors}
            layers.append(LayerReport(name, result.figures, time.perf_counter() - began))
        for name in sorted(remaining):
            writer.add_tensor(name, _read(checkpoint, name))
    written = open_checkpoint(out)
    return Report(
        recipe=recipe,
        out=out,
        layers=tuple(layers),
        quantized_linears=len(selection.quantized),
        bits_per_weight=_bits_per_weight(checkpoint, written, job.quantized),
        source_bytes=checkpoint.num_bytes,
        out_bytes=written.num_bytes,
        seconds=time.perf_counter() - start,
    )


def plan(checkpoint: Checkpoint, recipe: Recipe, device: torch.device) -> tuple[Job, Selection]:
    """Check everything that can be checked without reading weights."""
    if "quantization_config" in checkpoint.config:
        raise UnsupportedError(
            f"{checkpoint.path}: already quantized; calibrate the unquantized model it was made from"
        )
    names = checkpoint.config.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"{checkpoint.path}/config.json: architectures is {names!r}, wanted one name")
    arch = ARCHS[names[0]]
    config = ModelConfig.from_hf(checkpoint.config, arch)
    selection = select(arch, config.num_layers, recipe.ignore)
    check_groups(checkpoint, selection.quantized, recipe.spec)
    job = Job(checkpoint, arch, config, recipe, device, frozenset(selection.quantized))
    if not isinstance(getattr(torch, config.dtype, None), torch.dtype):
        raise CheckpointError(f"{checkpoint.path}/config.json: dtype {config.dtype!r} is not a torch dtype")
    # a grid that the scheme's kernels do not run fails here rather than when the result is served
    sample = torch.zeros(1, 2 * (recipe.spec.group_size or 128))
    grid = round_weight(sample, recipe.spec, job.scale_dtype)
    WEIGHT_SCHEMES[recipe.scheme].prepare(grid, torch.device("cpu"), job.scale_dtype)
    return job, selection


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor as stored; CheckpointError when a value is not finite."""
    tensor = checkpoint.tensor(name)
    blocks = tensor.flatten().split(1 << 24)  # the test makes copies: an lm_head's would outweigh a layer
    if not all(torch.isfinite(block).all() for block in blocks):
        raise CheckpointError(
            f"{checkpoint.path}: {name} holds NaN or infinity; the checkpoint is damaged, download it again"
        )
    return tensor


def read_layer(checkpoint: Checkpoint, layer: str) -> dict[str, Tensor]:
    """All tensors of a decoder layer, by their names inside it."""
    prefix = f"{layer}."
    names = [name for name in checkpoint.names() if name.startswith(prefix)]
    return {name.removeprefix(prefix): _read(checkpoint, name) for name in names}


def _write_layer(writer: CheckpointWriter, layer: str, result: LayerResult) -> None:
    for name, weight in result.linears.items():
        writer.add_linear(f"{layer}.{name}", weight)
    for name, tensor in result.tensors.items():
        writer.add_tensor(f"{layer}.{name}", tensor)


def _bits_per_weight(source: Checkpoint, written: Checkpoint, linears: frozenset[str]) -> float:
    """What the quantized Linears take on disk without their biases, per weight."""
    weights = sum(prod(source.spec(f"{linear}.weight").shape) for linear in linears)
    parts = (name.rpartition(".") for name in written.names())
    stored = [f"{module}.{part}" for module, _, part in parts if module in linears and part != "bias"]
    return 8 * sum(written.spec(name).num_bytes for name in stored) / weights
