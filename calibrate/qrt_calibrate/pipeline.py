"""The whole calibration: read a layer, quantize it, write it, forget it, for all layers."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from qrt.errors import CheckpointError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.format import is_finite
from qrt.quant.checkpoint.writer import CheckpointWriter
from qrt_calibrate.estimate.bits import WINDOWS, Point, allocate
from qrt_calibrate.estimate.budget import Budget, budget_of
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import Job, plan
from qrt_calibrate.model.executor import LayerExecutor, read, read_layer
from qrt_calibrate.model.head import RoundedHead, round_head
from qrt_calibrate.model.streams import Streams
from qrt_calibrate.recipe.recipe import Recipe
from qrt_calibrate.report.report import LayerReport, Report, bits_per_weight, source_of
from qrt_calibrate.rounding.precision import EXACT, TF32, products
from qrt_calibrate.steps.advance import WindowStates
from qrt_calibrate.steps.evaluate import Cost, measure_cost
from qrt_calibrate.steps.layer import LayerResult, quantize_layer
from qrt_calibrate.steps.sensitivity import gradient_windows, loss_gradients
from qrt_calibrate.steps.written import REST, TUNED, Written, label
from qrt_calibrate.text.text import Calibration, calibration
from qrt_calibrate.tuning.training import check_room


def calibrate(model: str | Path, recipe: Recipe, out: Path, *devices: torch.device) -> Report:
    """Quantize checkpoint `model` into the new folder `out`, on one device or several of one kind.

    Several devices share the windows, and the first one does the rest. Memory holds two copies of one decoder
    layer in fp32 with their temporaries, one Linear's input moments, and the hidden states of the windows,
    exact and rounded (each n_samples * seqlen * hidden size, fp32; in files if RAM is short). A run that ends
    early leaves its finished layers in `<out>.partial`; the same call continues from there to the same bytes.
    Raises QrtError for everything that a user can correct.
    """
    start = time.perf_counter()
    job = plan(open_checkpoint(model), recipe, *devices)
    _writer(job, out, None)  # refuses a folder that is taken, before anything is measured
    text, budget = prepare(job)
    curve: tuple[Point, ...] = ()
    if text is not None and budget is not None:
        job, curve = _with_bits(job, budget, text)
    recipe = job.recipe
    with products(TF32 if job.device.type == "cuda" else EXACT), _writer(job, out, text) as writer:
        foreseen = preflight(job)
        print(*foreseen.lines(), sep="\n", file=sys.stderr)
        if recipe.tune:  # beside the hidden states
            check_room(foreseen.tune_bytes + foreseen.hidden_bytes // len(set(job.devices)), job.device)
        run = Run(job, writer, text)
        layers = []
        with tqdm(total=job.arch.num_layers, desc="Calibrating", unit="layer") as bar:
            for index in range(job.arch.num_layers):
                layers.append(run.layer(index))
                bar.update()
        run.rest()
        cost = run.cost()
        tuned = run.tune()
        if tuned is not None:
            if cost is not None:
                tuned["kl_untuned"] = cost.kl
            cost = run.cost()
        report = Report(
            job=job,
            out=out,
            layers=tuple(layers),
            cost=cost,
            stored_bytes=writer.stored.num_bytes,
            bits_per_weight=bits_per_weight(job, writer.stored),
            calibration={**text.metadata["calibration"], **text.rows} if text else None,
            seconds=time.perf_counter() - start,
            curve=curve,
            tuned=tuned,
        )
        for name, content in report.files().items():
            writer.add_file(name, content)
    return report


def prepare(job: Job) -> tuple[Calibration | None, Budget | None]:
    """Return the text and the budget of a job, None if it has none.

    Raises QrtError if something is wrong with them, before anything is measured.
    """
    budget = budget_of(job) if job.recipe.has_budget else None
    text = calibration(job.recipe, job.checkpoint.path) if any(job.recipe.windows) else None
    return text, budget


def _writer(job: Job, out: Path, text: Calibration | None) -> CheckpointWriter:
    recipe = job.recipe
    grids = {name: (grid.scheme, grid.spec) for name, grid in job.written.items() if grid != recipe.grid}
    return CheckpointWriter(
        out,
        job.checkpoint,
        grid=(recipe.scheme, recipe.spec),
        overrides=grids,
        ignore=job.ignored,
        metadata={**recipe.metadata(), **source_of(job), **(text.metadata if text else {})},
        plan=_fingerprint(job, text),
    )


def _with_bits(job: Job, budget: Budget, text: Calibration) -> tuple[Job, tuple[Point, ...]]:
    """Return the job with widths chosen under its budget, and the trade-off."""
    windows = text.windows[:WINDOWS]
    executor = LayerExecutor(job.checkpoint, job.arch, windows.shape[1], job.device)
    allocation = allocate(executor, budget, windows, job.scale_dtype)
    overrides = (*allocation.overrides, *job.recipe.overrides)
    chosen = plan(job.checkpoint, replace(job.recipe, overrides=overrides), *job.devices)
    return replace(chosen, notes=job.notes), allocation.curve


class Run:
    """The steps of one job, from first to last; steps that `writer` already has are read, not repeated."""

    def __init__(self, job: Job, writer: CheckpointWriter, text: Calibration | None) -> None:
        self._job, self._writer = job, writer
        self._written = Written(job, writer)
        self._windows = None if text is None else self._begin(text.windows)

    def _begin(self, ids: Tensor) -> WindowStates:
        """Embed the windows, and compute the loss's gradients if a layer is left that needs them."""
        job, folder = self._job, self._writer.working_folder
        executor = LayerExecutor(job.checkpoint, job.arch, job.recipe.seqlen, job.device)
        calibrating, stored = (
            job.recipe.windows[0],
            job.checkpoint.spec(f"{job.arch.names.embed}.weight").dtype,
        )
        hidden = executor.embed(ids)
        executor.expect_finite(job.arch.names.embed, hidden)
        streams = Streams(hidden, calibrating, job.devices, folder, stored)
        count = gradient_windows(job.recipe)
        if count and not self._written.all_layers:
            loss_gradients(executor, streams, count, job.recipe.seed, folder)
        return WindowStates(executor, streams, ids)

    def layer(self, index: int) -> LayerReport:
        """Quantize and write layer `index`, or read it if it is written; then run it, exact and rounded."""
        began = time.perf_counter()
        job, windows, name = self._job, self._windows, self._job.layer_name(index)
        tensors, grids = read_layer(job.checkpoint, name), job.layer_grids(index)
        if not self._written.has(label(index)):
            executor, streams = (windows.executor, windows.streams) if windows else (None, None)
            if windows is not None:  # it is loaded several times
                tensors = {part: own.to(job.device) for part, own in tensors.items()}
            result = quantize_layer(job, index, tensors, executor, streams)
            figures = dict(result.figures)
            if windows is not None:
                if not job.recipe.rules.needs_text:
                    windows.advance(index, tensors, result, grids)
                figures |= windows.drift(index)
            _expect_finite(job, name, result, figures)
            self._written.write_layer(index, result, figures)
        elif windows is not None:
            windows.advance(index, tensors, self._written.layer(index), grids)
        return LayerReport(name, self._written.figures(label(index)), time.perf_counter() - began)

    def rest(self) -> None:
        """Copy the tensors outside the layers, and round the head if the recipe says so."""
        if self._written.has(REST):
            return
        job = self._job
        inside = tuple(f"{job.layer_name(index)}." for index in range(job.arch.num_layers))
        for name in job.checkpoint.names():
            if name == f"{job.arch.names.head}.weight" and job.recipe.head is not None:
                weight = read(job.checkpoint, name)
                head = round_head(weight, job.recipe.head, job.scale_dtype, job.device)
                self._writer.add_linear(job.arch.names.head, head)
            elif not name.startswith(inside):
                self._writer.add_tensor(name, read(job.checkpoint, name))
        self._writer.finish_step(REST, {})

    def tune(self) -> dict[str, float] | None:
        """Train the written layers end to end, write them again and run them.

        Returns the figures; None without --tune. A run that is killed here starts its training again.
        """
        if not self._job.recipe.tune:
            return None
        from qrt_calibrate.tuning.tune import tune  # here, because transformers takes seconds

        assert self._windows is not None
        streams, ids = self._windows.streams, self._windows.ids
        for share in streams.shares:
            share.gradients = None
        if not self._written.has(TUNED):
            linears, rest = self._written.model()
            if (head := self._written.head()) is not None:
                rest[f"{self._job.arch.names.head}.weight"] = head.dequantize()
            with products(EXACT):
                text = ids[: streams.calibrating]
                result = tune(self._job.checkpoint.path, self._job.training, linears, rest, text)
            self._written.write_tuned(result, linears)
        if self._job.recipe.eval_samples:
            layers = self._job.arch.num_layers
            self._windows.run_again(layers, partial(self._written.layer, tuned=True))
        return self._written.figures(TUNED)

    def cost(self) -> Cost | None:
        """Measure the cost of rounding on the windows kept apart for it."""
        if self._windows is None:
            return None
        weight, grid = self._written.head(), self._job.recipe.head
        head = RoundedHead(weight, grid, self._job.device) if weight and grid else None
        return measure_cost(self._windows.executor, self._windows.streams, self._windows.ids, head)


def _expect_finite(job: Job, layer: str, result: LayerResult, figures: Mapping[str, float]) -> None:
    """Raise CheckpointError for scales of a layer, or figures of it, that are NaN or infinite."""
    where = f"{job.source.path}: {layer}"
    for name, weight in result.linears.items():
        if weight.scale is not None and not is_finite(weight.scale):
            raise CheckpointError(
                f"{where}.{name}: expected scales that {job.arch.dtype} holds, got infinity: its weights are "
                "too large; set dtype in config.json to bfloat16, or download the checkpoint again"
            )
    for title, value in figures.items():
        if not math.isfinite(value):
            raise CheckpointError(
                f"{where}: {title}: expected a finite number, got {value}: its weights are too large; "
                "download the checkpoint again"
            )


def _fingerprint(job: Job, text: Calibration | None) -> dict[str, Any]:
    """Return everything that decides the bytes: two runs that agree in it may share their parts."""
    files = sorted(path for path in job.checkpoint.path.glob("*.safetensors"))
    return {
        "recipe": repr(job.recipe),
        "versions": {"torch": torch.__version__},
        "devices": [device.type for device in job.devices],
        "threads": torch.get_num_threads() if job.device.type == "cpu" else None,
        "config": hashlib.sha256(repr(sorted(job.checkpoint.config.items())).encode()).hexdigest(),
        "weights": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "text": text.metadata if text else None,
    }
