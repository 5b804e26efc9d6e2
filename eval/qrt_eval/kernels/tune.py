"""`qrt-eval kernels --tune`: finds the block sizes of the linear kernels for `qrt/kernels/tuned`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import torch
from tqdm import tqdm

from qrt.arch import ModelConfig
from qrt.errors import ConfigError
from qrt.kernels import tuned
from qrt.kernels.linear import int8_kernel, linear
from qrt.kernels.linear import kernel as tile_kernel
from qrt.layers.linear import Linear
from qrt_eval.kernels.linear import cold_copies, products, random_linear
from qrt_eval.kernels.timer import microseconds

FUSED_WIDTHS = (8, 16, 32, 64)
WIDE_WIDTHS = (128, 256, 512, 1024)
INT8_WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MEASURED_AT = {8: 1}  # a width stands for the token counts up to it; the largest unless given here
SMS = 132


class Trial(NamedTuple):
    """One launch configuration of one product."""

    scheme: str
    k: int
    n: int
    width: int
    config: tuple[int, ...]

    @property
    def key(self) -> str:
        """Where the winner goes in the file."""
        if self.scheme == "w8a8":
            return int8_kernel.tuning_key(self.k, self.n, self.width)
        return tile_kernel.tuning_key(self.k, self.n, 4 if self.scheme == "w4a16" else 8, self.width)


def trials(k: int, n: int) -> Iterator[Trial]:
    """Every configuration that is tried for a product, those of one weight together."""
    for scheme in ("w4a16", "w8a16"):
        blocks, tiles = -(-n // 64), -(-k // (256 if scheme == "w4a16" else 128))
        for width in FUSED_WIDTHS:
            usual = tile_kernel.plan(width, blocks, tiles).splits
            splits = {tile_kernel.even_splits(s, tiles) for s in (usual // 2, usual, 2 * usual) if s}
            for plan in product(sorted(splits), (2, 4), (3, 4) if width < 64 else (2, 3)):
                yield Trial(scheme, k, n, width, plan)
        for width in WIDE_WIDTHS:
            for block in _wide_blocks(width, blocks, tiles):
                yield Trial(scheme, k, n, width, block)
    for width in INT8_WIDTHS:
        for block in _int8_blocks(width, k, n):
            yield Trial("w8a8", k, n, width, block)


def _wide_blocks(width: int, blocks: int, tiles: int) -> Iterator[tuple[int, ...]]:
    yield ()  # dequantize
    if width > 512:
        return
    for tokens, rows, warps in ((64, 2, 4), (128, 1, 4), (128, 2, 8), (128, 4, 8), (256, 1, 4), (256, 2, 8)):
        programs = -(-blocks // rows) * -(-width // tokens)
        for splits in sorted({tile_kernel.even_splits(max(1, c * SMS // programs), tiles) for c in (1, 2)}):
            if tokens <= width:
                yield from ((tokens, rows, splits, warps, stages) for stages in (2, 3))


def _int8_blocks(width: int, k: int, n: int) -> Iterator[tuple[int, ...]]:
    if width <= 64:
        shapes = [(width, outputs, inputs, 4) for outputs in (32, 64) for inputs in (128, 256)]
        depths: tuple[int, ...] = (3, 4, 6)
    else:
        blocks = ((128, 64, 4), (128, 128, 8), (64, 64, 4), (64, 128, 4), (256, 128, 8), (128, 256, 8))
        shapes = [(t, o, i, warps) for t, o, warps in blocks if t <= width for i in (64, 128)]
        depths = (3, 4)
    for tokens, outputs, inputs, warps in shapes:
        programs = -(-n // outputs) * -(-width // tokens)
        for splits in sorted({1, max(1, SMS // programs), max(1, 2 * SMS // programs)} - {0}):
            if splits * inputs * 2 <= k and splits <= 8:
                yield from ((tokens, outputs, inputs, splits, warps, stages) for stages in depths)


def tune(configs: Sequence[ModelConfig], device: torch.device) -> None:
    """Measure the products of these models and write the file of this GPU, keeping what else is in it."""
    if device.type != "cuda":
        raise ConfigError("--tune: measures GPU kernels, and no GPU is here")
    sizes = sorted({size for config in configs for size in products(config).values()})
    todo = [trial for k, n in sizes for trial in trials(k, n)]
    _compile(todo)
    table = tuned.configs(device)
    best: dict[str, tuple[float, tuple[int, ...]]] = {}
    weight: tuple[tuple[str, int, int], list[Linear]] | None = None
    for trial in tqdm(todo, desc="Measuring", unit="kernel"):
        if weight is None or weight[0] != trial[:3]:
            weight = None  # frees the last ones first
            weight = trial[:3], cold_copies(random_linear(trial.scheme, trial.k, trial.n, device))
        us = _try(trial, weight[1], table)
        if us is not None and us < best.get(trial.key, (float("inf"),))[0]:
            best[trial.key] = us, trial.config
    table.update({key: list(config) for key, (_, config) in best.items()})
    file = tuned.path(torch.cuda.get_device_name(device))
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
    file.write_text("{\n" + lines + "\n}\n")
    print(f"{len(best)} block sizes written to {file}", file=sys.stderr)


def _try(trial: Trial, weights: Sequence[Linear], table: dict[str, list[int]]) -> float | None:
    """Microseconds, or None when the configuration does not fit the GPU."""
    tokens = MEASURED_AT.get(trial.width, trial.width)
    x = torch.randn(tokens, trial.k, device=weights[0].tensors[0].device, dtype=torch.bfloat16)
    before = table.get(trial.key)
    table[trial.key] = list(trial.config)
    try:
        return microseconds(linear, [(x, weight.tensors, None, trial.scheme) for weight in weights], 9)
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return None
    finally:
        if before is None:
            del table[trial.key]
        else:
            table[trial.key] = before


def _compile(todo: Sequence[Trial]) -> None:
    """Compile all configurations into Triton's cache, on all cores."""
    workers = min(os.cpu_count() or 1, 12)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        done = pool.map(_compile_one, todo, chunksize=8)
        list(tqdm(done, desc="Compiling", total=len(todo), unit="kernel"))


def _compile_one(trial: Trial) -> None:
    device = torch.device("cuda")
    # one block of rows and the whole K: what is compiled does not depend on N
    _try_once(trial, random_linear(trial.scheme, trial.k, trial.n, device), tuned.configs(device))


def _try_once(trial: Trial, weight: Linear, table: dict[str, list[int]]) -> None:
    tokens = MEASURED_AT.get(trial.width, trial.width)
    x = torch.randn(tokens, trial.k, device=weight.tensors[0].device, dtype=torch.bfloat16)
    table[trial.key] = list(trial.config)
    try:
        linear(x, weight.tensors, None, trial.scheme)
        torch.cuda.synchronize()
    except Exception as error:
        if "out of resource" not in str(error):
            raise
