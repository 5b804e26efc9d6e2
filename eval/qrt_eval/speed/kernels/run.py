"""Run `qrt-eval kernels`: choose operators and sizes, time them, print tables and write the JSON."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from rich.table import Table
from tqdm import tqdm

from qrt.arch import Arch
from qrt.errors import ConfigError
from qrt_eval.inputs.shapes import shape
from qrt_eval.results.console import show
from qrt_eval.results.record import save
from qrt_eval.speed.kernels import (
    all_reduce,
    attention,
    elementwise,
    experts,
    explain,
    layer,
    linear,
    peers,
    sample,
)
from qrt_eval.speed.kernels.row import OPS, KernelRow
from qrt_eval.speed.kernels.timer import Rates, measure_rates
from qrt_eval.speed.kernels.tune import tune

TOKENS = (1, 16, 64, 256, 4096)
LAYERS = ((1, 1024), (16, 1024), (64, 1024), (256, 1024))
DECODES = ((1, 4096), (1, 32768), (16, 4096), (64, 4096), (256, 1024), (16, 32768))
PREFILLS = ((4096, 0), (4096, 28672))
BY_TOKENS = {
    "chain": layer.chain_rows,
    "linear": linear.rows,
    "experts": experts.rows,
    "elementwise": elementwise.rows,
    "all-reduce": all_reduce.rows,
}


def run(arguments: Namespace) -> None:
    """Run `qrt-eval kernels`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.tune:
        tune([shape(name) for name in arguments.tune], device)
        return
    if arguments.explain:
        explain.run(arguments, device)
        return
    if arguments.model:
        raise ConfigError("--model: expected --explain beside it, as kernels are timed by --shape")
    rates = measure_rates(device)
    print(
        f"this machine: {rates.bytes_per_s / 1e9:,.0f} GB/s copied, "
        f"{rates.flops_per_s / 1e12:,.2f} TFLOP/s, int8 {rates.int8_ops_per_s / 1e12:,.2f} TOP/s",
        file=sys.stderr,
    )
    rows = []
    with tqdm(desc="Timing kernels", unit="cell", disable=not sys.stderr.isatty()) as bar:
        for row in measure(shape(arguments.shape), arguments, rates, device):
            rows.append(row)
            bar.update()
    facts = {"model": arguments.shape, "rates": asdict(rates)}
    save(arguments, {**facts, "kernels": [row.as_json() for row in rows]})
    for op in dict.fromkeys(row.op for row in rows):
        print_table(op, [row for row in rows if row.op == op])


def measure(config: Arch, arguments: Namespace, rates: Rates, device: torch.device) -> Iterator[KernelRow]:
    """Yield every cell that was asked for."""
    ops = arguments.op or OPS
    tokens = arguments.tokens or TOKENS
    decodes, prefills = arguments.decode or DECODES, arguments.prefill or PREFILLS
    if "layer" in ops:
        yield from layer.rows(config, decodes if arguments.decode else LAYERS, rates, device)
    for op, rows in BY_TOKENS.items():
        if op in ops:
            yield from rows(config, tokens, rates, device)
    if "decode" in ops:
        yield from attention.decode_rows(config, decodes, rates, device, arguments.compare)
    if "prefill" in ops:
        yield from attention.prefill_rows(config, prefills, rates, device, arguments.compare)
    if "kv_write" in ops:
        yield from attention.write_rows(config, tokens, rates, device)
    if "sample" in ops:
        yield from sample.rows(config, rates, device)
    if arguments.compare and device.type == "cuda":
        yield from peers.rows(config, ops, tokens, decodes, prefills, rates, device)


def print_table(op: str, rows: Sequence[KernelRow]) -> None:
    """Print microseconds and their share of the floor: one line per kernel, one column per size."""
    sizes = list(dict.fromkeys(row.at for row in rows))
    table = Table(title=f"{op}: microseconds (share of the floor)")
    table.add_column("")
    for size in sizes:
        table.add_column(size, justify="right")
    cells = {(row.what, row.at): row for row in rows}
    for what in dict.fromkeys(row.what for row in rows):
        line = []
        for size in sizes:
            row = cells.get((what, size))
            line.append(f"{row.us:,.1f} ({100 * row.floor_us / row.us:.0f} %)" if row else "")
        table.add_row(what, *line)
    show(table)
