"""Find block sizes of the linear kernels for `qrt/kernels/tuned`: `qrt-eval kernels --tune`.

It tries what won, or nearly won, on an H200 at Llama-3-8B's sizes. First each plan runs alone. Then the
fastest run in a layer, because the part of the GPU that a kernel leaves free as it ends goes to the next one.
A key whose plan in the GPU's file is one of those tried is not measured again. The file is written after
every model and weight scheme, so an interrupted run can continue; to measure everything again, remove the
file.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from qrt.arch import Arch
from qrt.errors import ConfigError
from qrt.kernels import tuned
from qrt.kernels.linear import linear, linear_act, linear_act_int8, linear_int8
from qrt.kernels.linear.int8.quantize_kernel import quantize_tokens
from qrt.layers.linear import Linear
from qrt.quant.digits import MOST_TOKENS
from qrt_eval.speed.kernels.layer import decode_step, layer_us, layers
from qrt_eval.speed.kernels.linear import cold_copies, in_int8, products, random_linear
from qrt_eval.speed.kernels.timer import microseconds
from qrt_eval.speed.kernels.trials import Trial, has_digits, pending, schemes

LAYER_WIDTHS = (8, 16, 32, 64, 128, 256)  # wider products are long, so their neighbours matter little
LAYER_STEP = "int8", 1024  # KV format and tokens of a request
LAYER_PLANS = 5  # plans of a product tried in a layer: the fastest alone
MEASURED_AT = {8: 1}  # a width serves all token counts up to it and is measured at the largest, or this one
COMPILED_ROWS = 1024  # N of the weights used to compile kernels; K is compiled in, N is not


def tune(configs: Sequence[Arch], device: torch.device) -> None:
    """Measure the products of these models and update the file of this GPU."""
    if device.type != "cuda":
        raise ConfigError("--tune: expected a GPU to measure, got none; run it where the GPU is")
    table, file = tuned.configs(device), tuned.path(torch.cuda.get_device_name(device))
    if not file.is_file():
        table.clear()  # it was another GPU's
    todo = pending(configs, table)
    _compile({trial.binary: trial for trial in todo}.values())
    with tqdm(total=len(todo), desc="Measuring", unit="kernel") as bar:
        left = todo
        for config, scheme in product(configs, schemes()):
            sizes = products(config).values()
            own = {trial for trial in left if trial.scheme == scheme and trial[1:3] in sizes}
            mine, left = [t for t in left if t in own], [t for t in left if t not in own]
            ranked = _ranked(mine, table, device, bar)
            table.update({key: entries[0] for key, entries in ranked.items()})
            if ranked:
                _choose_in_layer(config, scheme, ranked, table, device)
                _write(file, table)
        table.update({key: entries[0] for key, entries in _ranked(left, table, device, bar).items()})
        _write(file, table)
    print(f"{len({trial.key for trial in todo})} block sizes measured, written to {file}", file=sys.stderr)


def _ranked(
    todo: Sequence[Trial], table: dict[str, tuned.Measured], device: torch.device, bar: tqdm[Any]
) -> dict[str, list[tuned.Measured]]:
    """Return the plans of each key that fit the GPU, the fastest alone first."""
    times: dict[str, list[tuple[float, tuned.Measured]]] = defaultdict(list)
    for (scheme, k, n), group in groupby(todo, lambda trial: trial[:3]):
        weights = cold_copies(random_linear(scheme, k, n, device))
        for trial in group:
            us = _try(trial, weights, table)
            if us is not None:
                times[trial.key].append((us, trial.entry))
            bar.update()
        del weights  # frees them before the next ones are made
    return {key: [entry for _, entry in sorted(found, key=lambda f: f[0])] for key, found in times.items()}


def _choose_in_layer(
    config: Arch, scheme: str, ranked: Mapping[str, Sequence[tuned.Measured]],
    table: dict[str, tuned.Measured], device: torch.device,
) -> None:  # fmt: skip
    """Choose among each product's fastest plans the one that makes a layer fastest, and put it in `table`.

    If a layer runs them by `chain`, which has no plans, the fastest alone stays.
    """
    model = layers(config, scheme, device)
    for width in LAYER_WIDTHS:
        if width <= MOST_TOKENS and has_digits(scheme):
            continue
        keys = {Trial(scheme, k, n, width, None).key for k, n in products(config).values()} & ranked.keys()
        if not keys:
            continue
        kv, context = LAYER_STEP
        step = decode_step(model, kv, width, context)
        best = layer_us(model, step)
        for key in sorted(keys):
            for entry in ranked[key][1:LAYER_PLANS]:
                kept, table[key] = table[key], entry
                us = layer_us(model, step)
                if us < 0.995 * best:  # a smaller gain may be noise
                    best = us
                else:
                    table[key] = kept


def _write(file: Path, table: Mapping[str, tuned.Measured]) -> None:
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
    file.write_text("{\n" + lines + "\n}\n")


def _try(trial: Trial, weights: Sequence[Linear], table: dict[str, tuned.Measured]) -> float | None:
    """Return microseconds, or None if the configuration does not fit the GPU."""
    with _planned(trial, table):
        return microseconds(*_calls(trial, weights), 9, rest_s=0)  # there are hundreds of similar trials
    return None


def _calls(trial: Trial, weights: Sequence[Linear]) -> tuple[Callable[..., object], list[tuple[Any, ...]]]:
    """Return what is timed: an operator, and its arguments for each of the weights."""
    tokens = MEASURED_AT.get(trial.width, trial.width)
    by_digits = has_digits(trial.scheme) and tokens <= MOST_TOKENS  # in bf16 it has no plan
    dtype = torch.float16 if by_digits else torch.bfloat16
    x = torch.randn(tokens, trial.k, device=weights[0].tensors[0].device, dtype=dtype)
    act = ("silu",) if trial.gated else ()
    tensors = [list(own.tensors) for own in weights]  # the tensors of a Linear would keep their first plan
    if not in_int8(trial.scheme):
        plain = [(x, own, None, trial.scheme, *act) for own in tensors]
        return linear_act if trial.gated else linear, plain
    codes, scale, dtype = quantize_tokens(x)
    coded = [(codes, scale, own, None, trial.scheme, dtype, *act) for own in tensors]
    return linear_act_int8 if trial.gated else linear_int8, coded


@contextmanager
def _planned(trial: Trial, table: dict[str, tuned.Measured]) -> Iterator[None]:
    """Put the trial into `table` for the block; leave the block if the configuration does not fit the GPU."""
    before = table.get(trial.key)
    table[trial.key] = trial.entry
    try:
        yield
    except Exception as error:
        if "out of resource" not in str(error):
            raise
    finally:
        if before is None:
            del table[trial.key]
        else:
            table[trial.key] = before


def _compile(todo: Iterable[Trial]) -> None:
    """Compile the kernels of these trials into Triton's cache, on all cores."""
    todo = [trial._replace(n=COMPILED_ROWS) for trial in todo]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), get_context("spawn")) as pool:
        done = pool.map(_compile_one, todo, chunksize=4)
        list(tqdm(done, desc="Compiling", total=len(todo), unit="kernel"))


def _compile_one(trial: Trial) -> None:
    table, weight = tuned.configs(torch.device("cuda")), _weight(trial.scheme, trial.k, trial.n)
    with _planned(trial, table):
        operator, calls = _calls(trial, [weight])
        operator(*calls[0])
        torch.cuda.synchronize()


@lru_cache(maxsize=2)
def _weight(scheme: str, k: int, n: int) -> Linear:
    return random_linear(scheme, k, n, torch.device("cuda"))
