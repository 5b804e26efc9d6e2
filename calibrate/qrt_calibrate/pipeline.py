"""From a checkpoint folder to a quantized one: read a layer, quantize it, write it, forget it."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.writer import CheckpointWriter
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt_calibrate.estimate.bits import WINDOWS, Budget, Point, allocate, budget_of
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import Job, plan
from qrt_calibrate.model.decoder import BATCH_TOKENS, Decoder, read, read_layer
from qrt_calibrate.model.head import RoundedHead, round_head
from qrt_calibrate.model.streams import Share, Streams, drift_figures
from qrt_calibrate.recipe.recipe import Recipe
from qrt_calibrate.report.report import LayerReport, Report, bits_per_weight, source_of
from qrt_calibrate.rounding.fold import linear
from qrt_calibrate.rounding.precision import EXACT, TF32, products
from qrt_calibrate.rounding.rtn import for_writer
from qrt_calibrate.rounding.search import round_input
from qrt_calibrate.steps.evaluate import Cost, measure_cost
from qrt_calibrate.steps.layer import LayerResult, quantize_layer
from qrt_calibrate.steps.sensitivity import gradient_windows, loss_gradients
from qrt_calibrate.steps.tune import check_room, is_tuned_norm, tune
from qrt_calibrate.text.text import Calibration, calibration

REST = "rest"  # the step that ends with what is outside the layers written
TUNED = "tuned"  # the step that ends with trained codes, scales and norms written


def calibrate(model: str | Path, recipe: Recipe, out: Path, *devices: torch.device) -> Report:
    """Quantize checkpoint `model` into the new folder `out`, on one device or several
    of one kind: they share the windows, and the first one does the rest.

    Memory: two copies of one decoder layer in fp32 with their temporaries and one Linear's input moments, and
    the hidden states of the windows, exact and rounded (each n_samples * seqlen * hidden size, fp32; in files
    where RAM is short). A run that ends early leaves its finished layers in `<out>.partial`, and the same
    call goes on from there to the same bytes. Raises QrtError for whatever a user can put right.
    """
    start = time.perf_counter()
    job = plan(open_checkpoint(model), recipe, *devices)
    text, budget = prepare(job, out)
    curve: tuple[Point, ...] = ()
    if text is not None and budget is not None:
        job, curve = _with_bits(job, budget, text)
    recipe = job.recipe
    with products(TF32 if job.device.type == "cuda" else EXACT), _writer(job, out, text) as writer:
        print(*preflight(job).lines(), sep="\n", file=sys.stderr)
        if recipe.tune:
            check_room(job)
        run = Run(job, writer, text)
        layers = []
        with tqdm(total=job.config.num_layers, desc="Calibrating", unit="layer") as bar:
            for index in range(job.config.num_layers):
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


def prepare(job: Job, out: Path) -> tuple[Calibration | None, Budget | None]:
    """The text and the budget of a job, as far as it has them; what is wrong with them or with the folder
    `out` ends it here, before anything is measured."""
    _writer(job, out, None)  # refuses a folder that is taken
    budget = budget_of(job) if job.recipe.has_budget else None
    return calibration(job) if any(job.recipe.windows) else None, budget


def _writer(job: Job, out: Path, text: Calibration | None) -> CheckpointWriter:
    recipe = job.recipe
    grids = {name: (grid.scheme, grid.spec) for name, grid in job.written.items() if grid != recipe.grid}
    return CheckpointWriter(
        out,
        job.checkpoint,
        scheme=recipe.scheme,
        spec=recipe.spec,
        overrides=grids,
        ignore=job.ignored,
        metadata={**recipe.metadata(), **source_of(job), **(text.metadata if text else {})},
        plan=_fingerprint(job, text),
    )


def _with_bits(job: Job, budget: Budget, text: Calibration) -> tuple[Job, tuple[Point, ...]]:
    """The job with widths chosen under its budget, and the trade-off."""
    allocation = allocate(job, budget, text.windows[:WINDOWS])
    overrides = (*allocation.overrides, *job.recipe.overrides)
    chosen = plan(job.checkpoint, replace(job.recipe, overrides=overrides), *job.devices)
    return replace(chosen, notes=job.notes), allocation.curve


class Run:
    """The layers of one job, first to last; those that `writer` has already are only run, not quantized."""

    def __init__(self, job: Job, writer: CheckpointWriter, text: Calibration | None) -> None:
        self._job, self._writer, self._text = job, writer, text
        self._decoder: Decoder | None = None
        self._streams: Streams | None = None
        if text is not None:
            self._decoder = Decoder(job.checkpoint, job.arch, job.recipe.seqlen, job.device)
            hidden = self._decoder.embed(text.windows)
            calibrating, stored = job.recipe.windows[0], job.checkpoint.spec(f"{job.arch.embed}.weight").dtype
            self._streams = Streams(hidden, calibrating, job.devices, writer.working_folder, stored)
            self._measure_gradients()

    def _measure_gradients(self) -> None:
        """`loss_gradients`, if the method asks for them and a layer is still to quantize."""
        job, count = self._job, gradient_windows(self._job)
        done = all(_label(index) in self._writer.finished for index in range(job.config.num_layers))
        assert self._decoder is not None and self._streams is not None
        if count and not done:
            loss_gradients(job, self._decoder, self._streams, count, self._writer.working_folder)

    def layer(self, index: int) -> LayerReport:
        """Quantize layer `index` and write it, or take it up as written; then run it, exact and rounded."""
        began = time.perf_counter()
        name = self._job.layer_name(index)
        tensors = read_layer(self._job.checkpoint, name)
        label = _label(index)
        if label not in self._writer.finished:
            result = quantize_layer(self._job, index, tensors, self._decoder, self._streams)
            figures = dict(result.figures)
            if self._streams is not None:
                figures |= self._advance(index, tensors, result)
            _write_layer(self._writer, name, result)
            self._writer.finish_step(label, figures)
        elif self._streams is not None:
            self._advance(index, tensors, self._written(index))
        return LayerReport(name, dict(self._writer.notes(label)), time.perf_counter() - began)

    @torch.no_grad()
    def _advance(self, index: int, tensors: Mapping[str, Tensor], result: LayerResult) -> dict[str, float]:
        """Run the exact layer and the rounded one; return the report's figures of their outputs."""
        assert self._decoder is not None and self._streams is not None
        exact = self._decoder.load(index, tensors)
        rounded = self._decoder.load(index, _stored(result))
        for name, grid in self._job.layer_grids(index).items():
            if WEIGHT_SCHEMES[grid.scheme].int8_tokens:
                round_input(linear(rounded, name))
        run, step = self._decoder.run, max(1, BATCH_TOKENS // self._job.recipe.seqlen)

        def advance(share: Share, exact: nn.Module, rounded: nn.Module) -> Tensor:
            return share.advance(partial(run, index, exact), partial(run, index, rounded), step)

        return drift_figures(torch.cat(self._streams.each(advance, exact, rounded), 1))

    def _written(self, index: int, step: str | None = None) -> LayerResult:
        """A layer as an earlier run has written it, its Linears and norms as `step` has if that is not the
        layer's."""
        label, layer = _label(index), self._job.layer_name(index)
        linears = {
            name: self._writer.read_linear(step or label, f"{layer}.{name}")
            for name in self._job.layer_grids(index)
        }
        parts = {f"{layer}.{name}.{part}" for name in linears for part in ("weight", "bias")}
        inside = (name for name in self._job.checkpoint.names() if name.startswith(f"{layer}."))
        rest = {
            name.removeprefix(f"{layer}."): self._writer.read_tensor(
                step if step and is_tuned_norm(name) else label, name
            )
            for name in inside
            if name not in parts
        }
        return LayerResult(linears, rest, {})

    def rest(self) -> None:
        """Copy what is outside the layers, the head rounded if it is to be."""
        if REST in self._writer.finished:
            return
        job, inside = self._job, f"{self._job.arch.layers}."
        for name in job.checkpoint.names():
            if name == f"{job.arch.head}.weight" and job.recipe.head is not None:
                weight = read(job.checkpoint, name)
                head = round_head(weight, job.recipe.head, job.scale_dtype, job.device)
                self._writer.add_linear(job.arch.head, head)
            elif not name.startswith(inside):
                self._writer.add_tensor(name, read(job.checkpoint, name).to(job.checkpoint.spec(name).dtype))
        self._writer.finish_step(REST, {})

    def tune(self) -> dict[str, float] | None:
        """Train the written layers end to end, write them once more and run them: the figures; None where
        that is not asked for. A run killed here begins again with the first step."""
        if not self._job.recipe.tune:
            return None
        assert self._streams is not None and self._text is not None
        for share in self._streams.shares:
            share.gradients = None
        if TUNED not in self._writer.finished:
            linears, rest = self._model()
            if (head := self._head()) is not None:
                rest[f"{self._job.arch.head}.weight"] = head.dequantize()
            with products(EXACT):
                result = tune(self._job, linears, rest, self._text.windows[: self._streams.calibrating])
            for name, weight in result.linears.items():
                self._writer.add_linear(name, for_writer(weight, linears[name].bias), again=True)
            for name, norm in result.norms.items():
                self._writer.add_tensor(name, norm, again=True)
            self._writer.finish_step(TUNED, {"kl_first": result.kl_first, "kl_last": result.kl_last})
        self._run_again()
        return dict(self._writer.notes(TUNED))

    def _model(self) -> tuple[dict[str, WeightData], dict[str, Tensor]]:
        """All written layers: their Linears and their other tensors, by full names."""
        linears: dict[str, WeightData] = {}
        rest: dict[str, Tensor] = {}
        for index in range(self._job.config.num_layers):
            layer, name = self._written(index), self._job.layer_name(index)
            linears |= {f"{name}.{part}": weight for part, weight in layer.linears.items()}
            rest |= {f"{name}.{part}": tensor for part, tensor in layer.tensors.items()}
        return linears, rest

    @torch.no_grad()
    def _run_again(self) -> None:
        """Run the tuned layers on the windows that evaluate."""
        assert self._decoder is not None and self._streams is not None and self._text is not None
        run, step = self._decoder.run, max(1, BATCH_TOKENS // self._job.recipe.seqlen)
        if not self._job.recipe.eval_samples:
            return
        hidden = {share: share.rounded[share.calibrating :] for share in self._streams.shares}
        for share, own in hidden.items():
            own.copy_(self._decoder.embed(self._text.windows[share.numbers[share.calibrating :]]))

        def advance(share: Share, layer: nn.Module, index: int) -> None:
            for part in hidden[share].split(step):
                part.copy_(run(index, layer, part))

        for index in range(self._job.config.num_layers):
            layer = self._decoder.load(index, _stored(self._written(index, TUNED)))
            self._streams.each(partial(advance, index=index), layer)

    def cost(self) -> Cost | None:
        """What the whole cost, on the windows kept apart for it."""
        if self._decoder is None or self._streams is None or self._text is None:
            return None
        weight, grid = self._head(), self._job.recipe.head
        head = RoundedHead(weight, grid, self._job.device) if weight and grid else None
        return measure_cost(self._decoder, self._streams, self._text.windows, head)

    def _head(self) -> WeightData | None:
        """The head as it is written; None where it is not quantized."""
        if self._job.recipe.head is None:
            return None
        return self._writer.read_linear(REST, self._job.arch.head)


def _stored(layer: LayerResult) -> dict[str, Tensor]:
    """A layer's tensors with its weights as their codes say."""
    stored = dict(layer.tensors)
    for name, weight in layer.linears.items():
        stored[f"{name}.weight"] = weight.dequantize()
        if weight.bias is not None:
            stored[f"{name}.bias"] = weight.bias
    return stored


def _label(index: int) -> str:
    """The step that ends with layer `index` written."""
    return f"layer-{index:05d}"


def _fingerprint(job: Job, text: Calibration | None) -> dict[str, Any]:
    """All that decides the bytes: two runs that agree in it may share their parts."""
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


def _write_layer(writer: CheckpointWriter, layer: str, result: LayerResult) -> None:
    for name, weight in result.linears.items():
        writer.add_linear(f"{layer}.{name}", weight)
    for name, tensor in result.tensors.items():
        writer.add_tensor(f"{layer}.{name}", tensor)
