"""How long a calibration will take: parts of one layer's work timed on the device, then counted.

A foresight, not a measurement: reading and writing files and the report are left out, and another program on
the machine changes it. It costs one layer's forward on one batch and slices of the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from qrt.quant.spec import QuantSpec
from qrt_calibrate import tune
from qrt_calibrate.clip import search_clip
from qrt_calibrate.decoder import BATCH_TOKENS, Decoder, read_layer
from qrt_calibrate.experts import inside
from qrt_calibrate.gptq import BLOCK, ROW_BLOCKS, Factor, round_columns
from qrt_calibrate.method import Scales
from qrt_calibrate.plan import Job
from qrt_calibrate.recipe import Grid
from qrt_calibrate.rtn import round_weight
from qrt_calibrate.search import GRID
from qrt_calibrate.sensitivity import block_sizes, gradient_windows

SLICE = 256  # columns that GPTQ rounds, and rows whose clipping is searched
ORDER = 1024  # of the Hessian that is factorized


@torch.no_grad()
def expected_seconds(job: Job) -> float:
    """Seconds for all layers, from what the first one's parts take on the grids of each, and for the head."""
    tensors = read_layer(job.checkpoint, job.layer_name(0))
    layers = [job.layer_name(index) for index in range(job.config.num_layers)]
    seconds = 0.0
    for fused, parts in job.arch.fuse:
        stacked, times = (parts[:1], len(parts)) if _apart(job, fused) else (parts, 1)
        weight = torch.cat([tensors[f"{part}.weight"] for part in stacked])
        for grid, count in Counter(job.grids[f"{layer}.{parts[0]}"] for layer in layers).items():
            if grid is not None:
                seconds += count * times * _rounding(job, grid, weight.to(job.device, torch.float32))
    if any(job.recipe.windows):
        seconds += _reading(job, tensors) * len(layers)
    if job.recipe.head is not None:
        weight = job.checkpoint.tensor(f"{job.arch.head}.weight")
        few = weight[:SLICE].to(job.device, torch.float32)
        seconds += _nearest(few, job.recipe.head.spec, job.scale_dtype) * len(weight) / len(few)
    return seconds


def _nearest(few: Tensor, spec: QuantSpec, dtype: torch.dtype) -> float:
    """Rounding some rows to nearest."""
    return _seconds(lambda: round_weight(few, spec, dtype).dequantize(), few)


def _apart(job: Job, fused: str) -> bool:
    """Whether the parts of `fused` have inputs of their own: experts behind their first Linears."""
    return job.arch.is_expert(fused) and fused.endswith("down_proj")


def _rounding(job: Job, grid: Grid, weight: Tensor) -> float:
    """Searching and rounding one stack of weights [N, K]: slices of it, times their number."""
    steps, spec, dtype = job.recipe.steps, grid.spec, job.scale_dtype
    rows, columns = weight.shape
    few = weight[:SLICE]
    nearest = _nearest(few, spec, dtype) * rows / len(few)
    if not steps.needs_text:
        return nearest
    seconds = nearest * (1 + (GRID if steps.scales is Scales.AWQ else 0))
    if steps.clip:
        cost = torch.ones(columns, device=weight.device)
        found = _seconds(lambda: search_clip(few, cost, spec, dtype), few)
        seconds += found * rows / len(few)
    if steps.gptq:
        seconds += _gptq(weight, grid, dtype, steps.rows)
    return seconds


def _gptq(weight: Tensor, grid: Grid, dtype: torch.dtype, coupled: bool) -> float:
    """Factorizing a Hessian, and the walk over the columns with what each block sends to those behind; with
    `coupled` rows their moments are factorized too, the walk is longer and errors are sent on by rows."""
    rows, columns = weight.shape
    order = min(columns, ORDER)
    hessian = torch.eye(order, device=weight.device)
    factorized = _seconds(lambda: Factor.of(hessian, 0.01), weight) / order**3
    width = min(columns, max(SLICE, grid.spec.group_of(columns)))
    part = weight[:, :width]
    plain = round_weight(part, grid.spec, dtype)
    assert plain.scale is not None
    scale, zero = plain.scale, plain.zero
    eye = Factor(torch.arange(width, device=weight.device), torch.eye(width, device=weight.device), 0.0)
    walked = _seconds(lambda: round_columns(part, eye, scale, zero, grid.spec), part)
    spread = _seconds(lambda: part @ part.T[:, :SLICE], part) / (2 * rows * width * min(SLICE, rows))
    cubes, steps, sent = columns**3, columns, rows * columns**2
    if coupled:
        cubes += sum(size**3 for size in block_sizes(rows))
        steps += (ROW_BLOCKS - 1) * BLOCK
        sent += sum(size**2 for size in block_sizes(rows)) * columns
    return factorized * cubes + walked * steps / width + spread * sent


def _reading(job: Job, tensors: Mapping[str, Tensor]) -> float:
    """The layer's forwards over all windows, and the moments of its Linears' inputs; devices are taken to be
    alike, and to have as many windows each."""
    calibrating, evaluating = job.recipe.windows
    seqlen, device = job.recipe.seqlen, job.device
    decoder = Decoder(job.checkpoint, job.arch, seqlen, device)
    layer = decoder.load(0, tensors)
    batch = 1 if device.type == "cpu" else max(1, BATCH_TOKENS // seqlen)
    hidden = torch.randn(batch, seqlen, job.config.hidden_size, device=device)
    forward = _seconds(lambda: decoder.run(0, layer, hidden), hidden) / batch
    seconds = 2 * forward * (calibrating + evaluating)  # exact and rounded, to the next layer
    if felt := gradient_windows(job):  # once forth, twice forth and back
        back = _seconds(lambda: decoder.backward(0, layer, hidden, hidden), hidden) / batch
        seconds += (forward + 2 * back) * felt
    weights = {name: tensors[f"{name}.weight"] for name in job.arch.projections}
    total, before = sum(weight.numel() for weight in weights.values()), 0
    for fused, parts in job.arch.fuse:
        seconds += 2 * forward * calibrating * before / total  # of each, up to the Linears' input
        before += sum(weights[part].numel() for part in parts)
        x = torch.randn(batch * seqlen, weights[parts[0]].shape[1], device=device)
        moments = 2 * _seconds(partial(torch.mm, x.T, x), x)  # Hessian and drift
        if _apart(job, fused):  # every expert's, and what leads there, in both copies
            hidden = hidden.flatten(0, 1)
            moments += 2 * _seconds(partial(inside, layer, parts[0], hidden), hidden)
            moments *= len(parts)
        seconds += moments / batch * calibrating
    seconds /= len(job.devices)
    if job.recipe.tune:  # text drawn, the original and the rounded model forth, and back
        windows = job.recipe.tune * tune.windows_a_step(job) * min(tune.WINDOW, seqlen) / seqlen
        seconds += (2 + 1 + 1 + 2 + (1 + 2) / tune.TEXT_WINDOWS) * forward * windows
    return seconds


def _seconds(work: Callable[[], object], beside: Tensor) -> float:
    """Time of one call on `beside`'s device, the first call left out."""
    for _ in range(2):
        if beside.is_cuda:
            torch.cuda.synchronize(beside.device)
        began = time.perf_counter()
        work()
    if beside.is_cuda:
        torch.cuda.synchronize(beside.device)
    return time.perf_counter() - began
