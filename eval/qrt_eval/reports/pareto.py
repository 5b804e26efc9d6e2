"""Draw a sweep: what each pair of weights and KV costs in divergence, and what it buys.

Each weight scheme has a colour and each KV format a marker. A line joins the pairs that no other pair beats
on both axes. `python -m qrt_eval.reports.pareto RESULT.json` draws RESULT.svg beside it, for README and
docs/. It needs matplotlib: `pip install qrt[plot]`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qrt.cli import run_main
from qrt_eval.reports.picture import STYLE, fingerprint, require

COLORS = {
    "fp16": "#000000",
    "w8a16": "#0072b2",
    "w8a8": "#009e73",
    "w4a16": "#d55e00",
    "w4a8": "#cc79a7",
}
MARKERS = {"fp16": "o", "int8": "s", "int4": "^"}
OTHER = "#777777"
LINEAR_BELOW = 3.0  # the KL axis is linear from zero up to a third of the smallest value


def draw(result: Path, *targets: Path) -> None:
    """Draw a sweep's result file to each of `targets` (.svg, .png); the same file gives the same bytes."""
    require()
    import matplotlib
    from matplotlib.figure import Figure

    facts = json.loads(result.read_text())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        cells = facts["cells"]
        if any(cell["kl_mean"] is not None for cell in cells):
            left, right = figure.subplots(1, 2, sharey=True)
            panel(left, cells, "max_concurrent_requests", "kl_mean", f"Memory: {requests(facts)}")
            panel(right, cells, "tokens_per_second", "kl_mean", f"Speed: tokens/s, batch {facts['batch']}")
            _kl_axis(left, cells)
            left.set_ylabel("KL divergence from the unquantized model, nats")
        else:
            axes = figure.subplots()
            panel(axes, cells, "max_concurrent_requests", "tokens_per_second", f"Memory: {requests(facts)}")
            axes.set_ylabel(f"tokens/s at batch {facts['batch']}")
        _legend(figure, cells)
        title = f"{facts['model']} on {facts['environment']['device']}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        metadata = {"Date": None, "Title": title, "Source": fingerprint(result)}
        for target in targets:
            svg = target.suffix == ".svg"
            figure.savefig(target, metadata=metadata if svg else {"Software": None}, dpi=144)


def requests(facts: dict[str, Any]) -> str:
    """Return what the memory axis counts."""
    return f"requests of {facts['context_tokens']:,} tokens in {facts['memory_bytes'] / (1 << 30):g} GiB"


def panel(axes: Any, cells: Sequence[dict[str, Any]], x: str, y: str, title: str) -> None:
    """Draw one point per cell. More of `x` is better; so is less divergence, and more of any other `y`."""
    best = frontier([(cell[x], cell[y]) for cell in cells], less_y=y == "kl_mean")
    axes.plot(*zip(*best, strict=True), color="#bbbbbb", linewidth=1.2, zorder=1)
    for cell in cells:
        color, marker = COLORS.get(cell["weights"], OTHER), MARKERS.get(cell["kv"], "D")
        axes.plot(cell[x], cell[y], marker, color=color, markersize=7, zorder=2, clip_on=False)
    axes.set_title(title)
    axes.set_xlabel("more is better")
    axes.set_xlim(left=0)
    if y != "kl_mean":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def frontier(points: Sequence[tuple[float, float]], *, less_y: bool) -> list[tuple[float, float]]:
    """Return the points that no other beats in both, from the largest x to the smallest."""
    sign = 1 if less_y else -1
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: (-p[0], sign * p[1])):
        if not best or sign * point[1] < sign * best[-1][1]:
            best.append(point)
    return best


def _kl_axis(axes: Any, cells: Sequence[dict[str, Any]]) -> None:
    """Make the axis logarithmic, with room for the baseline's zero."""
    smallest = min((cell["kl_mean"] for cell in cells if cell["kl_mean"]), default=1.0)
    axes.set_yscale("symlog", linthresh=smallest / LINEAR_BELOW, linscale=0.3)
    axes.set_ylim(0, 2 * max(smallest, *(cell["kl_mean"] for cell in cells)))


def _legend(figure: Any, cells: Sequence[dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    weights = dict.fromkeys(cell["weights"] for cell in cells)
    formats = dict.fromkeys(cell["kv"] for cell in cells)
    handles = [
        Line2D(
            [], [], marker="o", linestyle="", color=COLORS.get(name, OTHER), label=f"{_plain(name)} weights"
        )
        for name in weights
    ]
    handles += [
        Line2D([], [], marker=MARKERS.get(name, "D"), linestyle="", color=OTHER, label=f"{_plain(name)} KV")
        for name in formats
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)


def _plain(name: str) -> str:
    return "16-bit" if name == "fp16" else name


def main(words: Iterable[str]) -> int:
    """Run `python -m qrt_eval.reports.pareto RESULT.json ...`; return the exit code."""

    def draw_all() -> None:
        for name in words:
            draw(Path(name), Path(name).with_suffix(".svg"))

    return run_main(draw_all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
