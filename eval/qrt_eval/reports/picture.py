"""Draw the kernels' picture of docs/benchmarks.md: `python -m qrt_eval.reports.picture [RESULT.json]`.

RESULT.json is a file that `qrt-eval kernels --compare --json` wrote. The picture, kernels.svg beside it,
carries the file's hash, so that tests/eval/reports/test_picture.py can check that it shows these results.
It needs matplotlib: `pip install qrt[plot]`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from qrt.cli import run_main
from qrt.errors import UnsupportedError

RESULT = Path("eval/results/h200/kernels_llama-3-8b.json")


class Series(NamedTuple):
    """Describe one line of a panel: `what` its rows are, its label, a colour of Okabe and Ito's palette."""

    what: str
    label: str
    color: str
    style: str = "-"


LINEAR = (
    Series("bf16 sum", "bf16 (cuBLAS)", "#000000"),
    Series("w8a8 sum", "w8a8", "#009e73"),
    Series("w8a16 sum", "w8a16", "#0072b2"),
    Series("w4a16 sum", "w4a16", "#d55e00"),
    Series("tinygemm int4 sum", "torch int4 (tinygemm)", "#777777", "--"),
)
DECODE = (
    Series("torch SDPA, contiguous", "torch SDPA, bf16, contiguous", "#777777"),
    Series("fp16", "bf16 KV", "#000000"),
    Series("int8", "int8 KV", "#0072b2"),
    Series("int4", "int4 KV", "#d55e00"),
)
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "qrt",
}


NAMES_APART = 1.17  # smallest ratio of the heights of two names


def fingerprint(result: Path) -> str:
    """Return the hash that a picture of this file carries."""
    return "sha256:" + hashlib.sha256(result.read_bytes()).hexdigest()


def require() -> None:
    """Raise UnsupportedError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("picture: expected matplotlib, got none; pip install 'qrt[plot]'") from error


def draw(result: Path, target: Path) -> None:
    """Draw the products and decode attention of a result file; the same file gives the same bytes."""
    require()
    import matplotlib
    from matplotlib.figure import Figure

    facts = json.loads(result.read_text())
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for row in facts["kernels"]:
        cells.setdefault((row["op"], row["what"]), {})[row["at"]] = row
    title = f"{facts['model']} on one {facts['environment']['device']}: less is better"
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
        draw_linear(left, {s: cells[key] for s in LINEAR if (key := ("linear", s.what)) in cells})
        draw_decode(right, {s: cells[key] for s in DECODE if (key := ("decode", s.what)) in cells})
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        metadata = {"Date": None, "Title": title, "Source": fingerprint(result)}
        figure.savefig(target, metadata=metadata if target.suffix == ".svg" else None, dpi=120)


def draw_linear(axes: Any, lines: dict[Series, dict[str, Any]]) -> None:
    """Draw time over tokens: a line per scheme, its floor dotted."""
    for series, rows in lines.items():
        tokens = [int(at.removeprefix("M=")) for at in rows]
        times = [row["us"] for row in rows.values()]
        axes.plot(tokens, times, series.style, color=series.color, marker="o", markersize=3.5, linewidth=1.5)
        if series.style == "-":
            axes.plot(
                tokens, [row["floor_us"] for row in rows.values()], ":", color=series.color, linewidth=1
            )
    _name_lines(axes, lines)
    ticks = sorted({int(at.removeprefix("M=")) for rows in lines.values() for at in rows})
    axes.set(xscale="log", yscale="log", xlabel="tokens in the step", ylabel="time of the four products, µs")
    axes.set_xlim(left=ticks[0] / 24)  # leaves room for the names
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_title("The products of one layer (dotted: floor)")
    _mark_times(axes, "y")


def _name_lines(axes: Any, lines: dict[Series, dict[str, Any]]) -> None:
    """Write each line's name left of its first point, apart from the name below.

    A dashed line crosses others there, so its name stands left of its last point.
    """
    ends = [(list(rows.items())[0 if series.style == "-" else -1], series) for series, rows in lines.items()]
    below = 0.0
    for (at, row), series in sorted(ends, key=lambda end: end[0][1]["us"]):
        height = max(row["us"], below)
        below = height * NAMES_APART if series.style == "-" else below
        tokens = int(at.removeprefix("M="))
        axes.annotate(series.label, (tokens, height), (-7, 0), textcoords="offset points", ha="right",
                      va="center", color=series.color)  # fmt: skip


def draw_decode(axes: Any, lines: dict[Series, dict[str, Any]]) -> None:
    """Draw a row per size and format: a dot at its time, and a bar back to its floor."""
    sizes = list(dict.fromkeys(at for rows in lines.values() for at in rows))
    step = len(lines) + 1
    for i, (series, rows) in enumerate(lines.items()):
        for at, row in rows.items():
            y = sizes.index(at) * step + i
            axes.plot((row["floor_us"], row["us"]), (y, y), color=series.color, linewidth=1.5, alpha=0.6)
            axes.plot(row["floor_us"], y, "|", color=series.color, markersize=6)
            axes.plot(row["us"], y, "o", color=series.color, markersize=4.5)
            name = f"{row['us']:,.0f}" + f"  {series.label}" * (at == sizes[0])
            axes.annotate(name, (row["us"], y), (6, 0), textcoords="offset points", va="center",
                          color=series.color, fontsize=8)  # fmt: skip
    middles = [i * step + (len(lines) - 1) / 2 for i in range(len(sizes))]
    axes.set_yticks(middles, [_size(at) for at in sizes])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(
        xscale="log", xlabel="time of decode attention in one layer, µs", ylabel="requests × context tokens"
    )
    axes.set_title("Decode attention (bar: from the floor to the time)")
    _mark_times(axes, "x")


def _size(at: str) -> str:
    return " × ".join(f"{int(number):,}" for number in at.split(" x "))


def _mark_times(axes: Any, axis: str) -> None:
    """Mark 1, 3, 10, 30 and so on with plain numbers and a faint grid."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    times = getattr(axes, f"{axis}axis")
    times.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    times.set_minor_locator(NullLocator())
    times.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis=axis, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def main(words: Iterable[str]) -> int:
    """Run `python -m qrt_eval.reports.picture [RESULT.json]`; return the exit code."""
    result = Path(next(iter(words), RESULT))
    return run_main(lambda: draw(result, result.with_name("kernels.svg")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
