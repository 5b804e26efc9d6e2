"""The summary a calibration ends with: one row per layer, sizes, and where the output went."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qrt_calibrate.recipe import Recipe


@dataclass(frozen=True)
class LayerReport:
    """One finished layer: the method's figures by column title, and its time."""

    name: str
    figures: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Report:
    """One finished calibration; `bits_per_weight` is what the quantized Linears take on disk."""

    recipe: Recipe
    out: Path
    layers: tuple[LayerReport, ...]
    quantized_linears: int
    bits_per_weight: float
    source_bytes: int
    out_bytes: int
    seconds: float

    def print(self, console: Console) -> None:
        """Write the table and the closing lines."""
        table = Table(title=f"{self.recipe.scheme} by {self.recipe.method}")
        columns = list(self.layers[0].figures)
        table.add_column("layer")
        for column in (*columns, "seconds"):
            table.add_column(column, justify="right")
        for layer in self.layers:
            figures = [f"{layer.figures[column]:.4g}" for column in columns]
            table.add_row(layer.name, *figures, f"{layer.seconds:.1f}")
        console.print(table)
        lines = (
            f"{self.quantized_linears} Linears at {self.bits_per_weight:.3f} bits per weight",
            f"{_megabytes(self.source_bytes)} -> {_megabytes(self.out_bytes)} in {self.seconds:.1f} s",
            f"written to {self.out}",
        )
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False, markup=False)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
