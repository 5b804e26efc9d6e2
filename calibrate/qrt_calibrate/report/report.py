"""The report of a calibration: a table on screen, qrt_report.json and qrt_report.html beside the weights.

The files hold no time and no path, so that reruns write the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from qrt.errors import CheckpointError
from qrt.model_files.location import api_name, model_commit, model_name
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.version import __version__
from qrt_calibrate.estimate.bits import Point
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.estimate.sizes import COUNTED, linear_weights
from qrt_calibrate.job.plan import Job
from qrt_calibrate.model.streams import LARGEST_TOKEN
from qrt_calibrate.report.page import NEAREST, figure, render
from qrt_calibrate.steps.evaluate import Cost

WORST = 5  # number of worst layers that the report names
MASSIVE = 20  # a token this many times the median has massive activations (arXiv:2402.17762)
UNCOUNTED = ("bias", "weight_shape")  # tensors of a Linear that do not count in bits per weight


@dataclass(frozen=True)
class LayerReport:
    """One finished layer: its figures by column title, and the seconds it took."""

    name: str
    figures: dict[str, float]
    seconds: float

    @property
    def error(self) -> str:
        """The title of its error, the first of its figures."""
        return next(iter(self.figures))

    @property
    def nearest(self) -> float | None:
        """The error that rounding to nearest would leave; None if unknown."""
        return self.figures.get(f"{self.error}{NEAREST}")

    @property
    def is_above_nearest(self) -> bool:
        """Whether the layer's error is larger than rounding to nearest would leave."""
        return self.nearest is not None and self.figures[self.error] > self.nearest


@dataclass(frozen=True)
class Report:
    """One finished calibration.

    cost          cost of rounding on text kept apart, None without such text
    stored_bytes  bytes of all tensors written
    bits_per_weight    as `sizes.bits_per_weight` counts
    calibration   the text and how it was cut, None if none was read
    tuned         training's KL on drawn text in its first and last steps, and the KL before it on the text
                  kept apart; None without --tune
    curve         bits against KL, if bits were chosen under a budget
    """

    job: Job = field(repr=False)  # with every Linear and layer a repr would take pages
    out: Path
    layers: tuple[LayerReport, ...] = field(repr=False)
    cost: Cost | None
    stored_bytes: int
    bits_per_weight: float
    calibration: dict[str, Any] | None
    seconds: float
    curve: tuple[Point, ...] = ()
    tuned: dict[str, float] | None = None

    @property
    def title(self) -> str:
        """Grids and method."""
        recipe, grids = self.job.recipe, dict.fromkeys(self.job.quantized.values())
        named = [grid.describe() for grid in grids] + (
            [f"head {recipe.head.describe()}"] if recipe.head else []
        )
        return f"{', '.join(named)} by {recipe.method}"

    def to_json(self) -> dict[str, Any]:
        """Return everything but times and paths."""
        recipe = self.job.recipe
        chosen: dict[str, list[str]] = {}
        for name, grid in (self.job.grids | self.job.written).items():
            chosen.setdefault(grid.describe() if grid else "fp16", []).append(name)
        return {
            **source_of(self.job),
            "versions": {"qrt": __version__, "torch": torch.__version__},
            "recipe": {
                "method": recipe.method,
                "damping": recipe.damping,
                "exact_folds": recipe.exact_folds,
                "moe_calibrate_all_experts": recipe.moe_calibrate_all_experts,
                "tune": recipe.tune,
                "seed": recipe.seed,
                "ignore": list(recipe.ignore),
            },
            "calibration": self.calibration,
            "grids": {grid: len(names) for grid, names in chosen.items()},
            "linears": chosen,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "source_bytes": self.job.source.num_bytes,
            "source_weights": self.job.origin,
            "stored_bytes": self.stored_bytes,
            "tuned": self.tuned,
            "cost": asdict(self.cost) if self.cost else None,
            "layers": [{"name": layer.name, **layer.figures} for layer in self.layers],
            "curve": [asdict(point) for point in self.curve],
            "findings": list(preflight(self.job).findings),
            "worst_layers": [layer.name for layer in self.worst],
            "massive_layers": [layer.name for layer in self.massive],
            "above_rtn": [layer.name for layer in self.layers if layer.is_above_nearest],
        }

    @property
    def worst(self) -> list[LayerReport]:
        """The layers with the largest errors, the worst first."""
        return sorted(self.layers, key=lambda layer: -layer.figures[layer.error])[:WORST]

    def files(self) -> dict[str, str]:
        """Return the contents of qrt_report.json and qrt_report.html."""
        facts = self.to_json()
        try:
            content = json.dumps(facts, indent=2, allow_nan=False)
        except ValueError:
            raise CheckpointError(
                f"{self.job.source.path}: a figure of the result is NaN or infinite; does the model run "
                "unquantized?"
            ) from None
        return {
            "qrt_report.json": content + "\n",
            "qrt_report.html": render(api_name(self.job.checkpoint.path), self.title, facts),
        }

    def print(self, console: Console) -> None:
        """Write the table and the closing lines."""
        table = Table(title=self.title)
        columns = list(dict.fromkeys(column for layer in self.layers for column in layer.figures))
        table.add_column("layer", no_wrap=True)
        for column in (*columns, "seconds"):
            table.add_column(column, justify="right")
        for layer in self.layers:
            figures = [figure(layer.figures[column]) if column in layer.figures else "" for column in columns]
            name, style = (f"{layer.name} !", "bold red") if layer.is_above_nearest else (layer.name, None)
            table.add_row(name, *figures, f"{layer.seconds:.1f}", style=style)
        console.print(table)
        source = self.job.source.num_bytes
        lines = [
            f"{len(self.job.quantized)} of {len(self.job.grids)} Linears quantized, "
            f"{self.bits_per_weight:.3f} {COUNTED}",
            f"{_megabytes(source)} -> {_megabytes(self.stored_bytes)} in {self.seconds:.1f} s",
            f"written to {self.out}",
        ]
        if self.cost is not None:
            cost = self.cost
            lines.insert(
                0,
                f"perplexity {cost.exact_ppl:.4f} -> {cost.ppl:.4f} "
                f"({100 * (cost.ppl / cost.exact_ppl - 1):+.2f} %), KL {cost.kl:.5f} nats, "
                f"same likeliest token {100 * cost.agreement:.1f} % ({cost.tokens:,} tokens kept apart)",
            )
        if self.tuned is not None:
            first, last = self.tuned["kl_first"], self.tuned["kl_last"]
            lines.insert(
                0, f"tuned in {self.job.recipe.tune} steps: KL {first:.5f} -> {last:.5f} on drawn text"
            )
        lines[:0] = self._above_nearest()
        lines += self._massive_activations()
        lines += [f"{point.bits:.3f} bits, KL {point.kl:.5f}: {point.change}" for point in self.curve]
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    @property
    def massive(self) -> list[LayerReport]:
        """The layers after which a token is many times larger than most."""
        return [layer for layer in self.layers if layer.figures.get(LARGEST_TOKEN, 0.0) > MASSIVE]

    def _massive_activations(self) -> list[str]:
        """Name the layers after which tokens have massive activations."""
        layers = self.massive
        if not layers:
            return []
        most = max(layer.figures[LARGEST_TOKEN] for layer in layers)
        named = ", ".join(layer.name.rpartition(".")[2] for layer in layers)
        return [
            f"massive activations after layers {named}: a token is up to {most:.0f} times the median token"
        ]

    def _above_nearest(self) -> list[str]:
        """Name the layers whose error is larger than that of rounding to nearest."""
        error, count = self.layers[0].error, len(self.layers)
        above = [
            f"{layer.name} ({figure(layer.figures[error])}, rtn {figure(layer.nearest)})"
            for layer in self.layers
            if layer.is_above_nearest
        ]
        named = ", ".join(above)
        line = f"! {error} above rounding to nearest's in {len(above)} of {count} layers: {named}"
        return [line] if above else []


def source_of(job: Job) -> dict[str, Any]:
    """Return the Hub name and commit of the calibrated model; {} for a folder, whose path may change."""
    folder = job.source.path
    commit = model_commit(folder)
    return {} if commit is None else {"source": {"model": model_name(folder), "commit": commit}}


def bits_per_weight(job: Job, stored: TensorFolder) -> float:
    """Count the bits per weight of the written tensors, as `sizes.bits_per_weight` estimates them."""
    parts = (name.rpartition(".") for name in stored.names())
    own = [f"{module}.{part}" for module, _, part in parts if module in job.grids and part not in UNCOUNTED]
    return 8 * sum(stored.spec(name).num_bytes for name in own) / linear_weights(job.checkpoint, job.grids)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
