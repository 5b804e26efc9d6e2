"""Measure every weight scheme with every KV format in one table: `qrt-eval sweep`.

qrt-calibrate makes the checkpoints that are not given. Quality is compared with the unquantized model with
unquantized KV, over the same windows, in float32 on a CPU. Bytes and speed are those of the served model, in
bf16. With --shape (random weights) there is no quality. Each cell is kept when it is done, so the same
command resumes an interrupted sweep. The folder gets result.json, pareto.svg, pareto.png and report.html.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from qrt.cli import check_output
from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.errors import ConfigError, QrtError
from qrt.model_files.location import api_name, model_commit, pinned_name, short_name
from qrt.quant.weight import WEIGHT_SCHEMES, quantized, weight_only
from qrt.registry import nearest
from qrt_eval.inputs.lengths import Fixed
from qrt_eval.inputs.text import EvalText, load_text
from qrt_eval.quality import kld
from qrt_eval.quality.forward import CHUNK_TOKENS
from qrt_eval.quality.partial import PartialResult
from qrt_eval.quality.reference import ReferenceLogprobs
from qrt_eval.reports import pareto, picture
from qrt_eval.reports.page import write_page
from qrt_eval.results.console import show
from qrt_eval.results.record import checkpoint_sha256, command_facts, engine_facts, environment, write_json
from qrt_eval.speed import throughput
from qrt_eval.speed.latency import random_decoder
from qrt_eval.speed.workload import in_batches

GIB = 1 << 30
UTILIZATION = EngineConfig.gpu_memory_utilization
PLAIN = "fp16"  # weights and KV format of the baseline
QUALITY = ("ppl", "ppl_change", "kl_mean", "kl_se", "kl_p99", "top1_agreement", "top_p_flips")
SPEED = ("tokens_per_second", "output_tokens_per_second", "achieved_GBps", "host_gap", "repeats")


@dataclass(frozen=True)
class Sweep:
    """Hold what is swept, read from the command line once.

    folder   where the result, the picture, the report and the checkpoints go
    given    checkpoints of --checkpoint, by scheme
    text     the text that quality is measured on; None with a shape
    """

    arguments: Namespace
    name: str
    folder: Path
    weights: tuple[str, ...]
    kv: tuple[str, ...]
    given: Mapping[str, str]
    text: EvalText | None

    @classmethod
    def read(cls, arguments: Namespace) -> Sweep:
        """Read the command line; ConfigError for schemes and formats that qrt does not have."""
        weights = _schemes("--weights", arguments.weights)
        kv = tuple(dict.fromkeys(arguments.kv))
        given = _given(arguments, weights)
        known = weights if arguments.shape else {PLAIN, *quantized(), *given}
        if left := [scheme for scheme in weights if scheme not in known]:
            raise ConfigError(
                f"--weights {left[0]}: expected a checkpoint, which qrt-calibrate does not make; "
                f"give one with --checkpoint {left[0]}=MODEL"
            )
        name = arguments.shape or short_name(arguments.model)
        folder = Path(arguments.out or f"sweep-{name}")
        text = None if arguments.shape else load_text(arguments.dataset, arguments.data_file)
        return cls(arguments, name, folder, weights, kv, given, text)

    @property
    def result(self) -> Path:
        """Return the path of the result file."""
        return self.folder / "result.json"


def short_names() -> dict[str, str]:
    """Return what stands for a scheme: the bits of weights that alone are rounded, and 16."""
    return {"16": PLAIN} | {str(bits): name for bits, name in reversed(weight_only().items())}


def _schemes(flag: str, words: Sequence[str]) -> tuple[str, ...]:
    known, short = list(WEIGHT_SCHEMES), short_names()
    names = [short.get(word, word) for word in words]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{flag}: expected one of {', '.join([*short, *known])}, got {name!r}{nearest(name, known)}"
            )
    return tuple(dict.fromkeys(names))


def _given(arguments: Namespace, weights: Sequence[str]) -> dict[str, str]:
    """Return given checkpoints by scheme; ConfigError for one that the sweep would not read."""
    given: dict[str, str] = {}
    for word in arguments.checkpoint:
        scheme, equals, folder = word.partition("=")
        if not equals or not folder:
            raise ConfigError(f"--checkpoint: expected SCHEME=MODEL, e.g. 4=model-w4, got {word!r}")
        if arguments.shape:
            raise ConfigError(f"--checkpoint: expected --model beside it, got --shape; leave {word} out")
        (name,) = _schemes("--checkpoint", [scheme])
        if name not in weights:
            asked = " ".join(arguments.weights)
            raise ConfigError(f"--checkpoint: expected a scheme of --weights {asked}, got {word}")
        given[name] = folder
    return given


def run(arguments: Namespace) -> None:
    """Run `qrt-eval sweep`: measure every cell, then write table, result, picture and report."""
    picture.require()  # fails now instead of after an hour of work
    sweep = Sweep.read(arguments)
    check_output("--out", sweep.result)
    partial = PartialResult(sweep.result)
    base, cells = None, []
    for weights in sweep.weights:
        checkpoint = None if arguments.shape else checkpoint_of(sweep, weights)
        for kv in sweep.kv:
            key = cell_key(sweep, weights, kv, checkpoint)
            kept = partial.load(key).get(0)
            if kept is None:
                print(f"{weights} weights, {kv} KV", file=sys.stderr)
                if base is None and sweep.text is not None:
                    base = baseline(sweep, sweep.text)
                kept = measure(sweep, weights, kv, checkpoint, base)
                partial.add(key, {0: kept})
            cells.append(kept)
    facts = {**command_facts(arguments), **about(sweep), "cells": cells}
    write_json(sweep.result, facts)
    pareto.draw(sweep.result, sweep.folder / "pareto.svg", sweep.folder / "pareto.png")
    write_page(sweep.result, sweep.folder)
    partial.remove()
    print_table(sweep, cells)
    print(f"written to {sweep.folder}: result.json, pareto.svg, pareto.png, report.html", file=sys.stderr)


def cell_key(sweep: Sweep, weights: str, kv: str, checkpoint: str | None) -> dict[str, Any]:
    """Return everything that a cell's figures depend on."""
    flags = command_facts(sweep.arguments)["arguments"]
    flags = {
        name: value for name, value in flags.items() if name not in ("weights", "kv", "out", "checkpoint")
    }
    return {
        **flags,
        "cell": [weights, kv],
        "checkpoint": checkpoint and checkpoint_sha256(checkpoint),
        "base": sweep.text and checkpoint_sha256(sweep.arguments.model),
        "text": sweep.text and sweep.text.sha256,
        "device": environment()["device"],
    }


def checkpoint_of(sweep: Sweep, weights: str) -> str:
    """Return the checkpoint of a scheme: the model itself, a given one, or one made here.

    A file beside a checkpoint made here holds the `checkpoint_sha256` of its model.
    """
    from qrt_calibrate.cli import main as calibrate

    if weights in sweep.given:
        return sweep.given[weights]
    if weights == PLAIN:
        return str(sweep.arguments.model)
    out = sweep.folder / f"{sweep.name}-{weights.removesuffix('a16')}"
    source, made_of = out.with_name(f"{out.name}.source"), checkpoint_sha256(sweep.arguments.model)
    if (out / "config.json").is_file():
        if not source.is_file() or source.read_text() != made_of:
            raise ConfigError(
                f"{out}: expected a checkpoint made from {sweep.arguments.model} as it is now, got another; "
                f"remove it, choose another --out, or give it as --checkpoint {weights}={out}"
            )
        return str(out)
    print(f"making {out} with qrt-calibrate", file=sys.stderr)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    source.write_text(made_of)
    if calibrate(["--model", sweep.arguments.model, "--scheme", weights, "--out", str(out)]):
        raise QrtError(f"--weights {weights}: qrt-calibrate failed; give a checkpoint with --checkpoint")
    return str(out)


def baseline(sweep: Sweep, text: EvalText) -> ReferenceLogprobs:
    """Return the unquantized model's distributions over the windows."""
    llm, windows, facts = kld.ready_baseline(sweep.arguments, sweep.arguments.model, PLAIN, text)
    base = kld.compute_reference(llm, windows, facts, CHUNK_TOKENS)
    del llm
    kld.release()
    return base


def measure(
    sweep: Sweep, weights: str, kv: str, checkpoint: str | None, base: ReferenceLogprobs | None
) -> dict[str, Any]:
    """Return one cell: bytes and speed, and quality if there is a checkpoint."""
    quality: dict[str, Any] = dict.fromkeys(QUALITY)
    if base is not None and checkpoint is not None:
        llm = kld.reader_model(checkpoint, kv, sweep.arguments.dtype, base.longest)
        figures = kld.diverge(llm, base, kld.TOP_P, 0, CHUNK_TOKENS).figures
        quality |= {name: figures[name] for name in QUALITY if name in figures}
        quality["ppl_change"] = figures["ppl"] / figures["base_ppl"] - 1
        del llm
        kld.release()
    engine = serving_engine(sweep.arguments, weights, kv, checkpoint)
    facts = engine_facts(engine, sweep.name)
    fits = fitting(sweep.arguments, facts["weight_bytes"], engine.kv_bytes_kept(sweep.arguments.context))
    row = speed(engine, sweep.arguments)
    del engine
    kld.release()
    return {
        "weights": weights,
        "kv": kv,
        "checkpoint": checkpoint and pinned_name(checkpoint),
        "weight_bytes": facts["weight_bytes"],
        "kv_bytes_per_token": facts["kv_bytes_per_token"],
        "max_concurrent_requests": fits,
        **quality,
        **{name: row[name] for name in SPEED},
    }


def speed(engine: Engine, arguments: Namespace) -> dict[str, Any]:
    """Return the row of `qrt-eval throughput` for the batch."""
    lengths = Fixed(arguments.input_len, arguments.output_len)
    load = in_batches(engine, lengths, arguments.batch, arguments)
    return throughput.measure(engine, load, arguments.repeats)


def fitting(arguments: Namespace, weight_bytes: int, kv_bytes: int) -> int:
    """Return how many requests of --context tokens, `kv_bytes` each, fit beside the weights in --memory-gib.

    It uses the engine's memory utilization. The memory that a step needs is not counted.
    """
    room = arguments.memory_gib * GIB * UTILIZATION - weight_bytes
    return max(0, int(room // kv_bytes))


def serving_engine(arguments: Namespace, weights: str, kv: str, checkpoint: str | None) -> Engine:
    """Build the engine whose speed is measured, in bf16, for a batch of requests."""
    config = EngineConfig(
        model=checkpoint or arguments.shape,
        kv=kv,
        dtype="bfloat16",
        max_model_len=arguments.input_len + arguments.output_len,
        max_num_seqs=arguments.batch,
        enable_prefix_caching=False,
    )
    if checkpoint is not None:
        return Engine(config)
    return Engine(config, random_decoder(arguments.shape, weights))


def about(sweep: Sweep) -> dict[str, Any]:
    """Return what the figures belong to."""
    arguments, text = sweep.arguments, sweep.text
    return {
        "model": arguments.shape or api_name(arguments.model),
        "model_revision": None if arguments.shape else model_commit(arguments.model),
        "dataset": text and text.name,
        "text_sha256": text and text.sha256,
        "protocol": text and arguments.protocol,
        "seqlen": arguments.seqlen if text else None,
        "windows": arguments.limit if text else None,
        "memory_bytes": int(arguments.memory_gib * GIB),
        "context_tokens": arguments.context,
        "batch": arguments.batch,
    }


def print_table(sweep: Sweep, cells: list[dict[str, Any]]) -> None:
    """Print all cells."""
    arguments = sweep.arguments
    requests = f"{arguments.context:,} tokens in {arguments.memory_gib:g} GiB"
    table = Table(
        title=f"{sweep.name}; requests of {requests}; speed at batch {arguments.batch}", title_justify="left"
    )
    for name in ("weights", "KV"):
        table.add_column(name)
    measured = [] if arguments.shape else ["ppl", "change", "KL", "same top-1"]
    for name in ("weights MB", "KV B/token", "requests", *measured, "tokens/s"):
        table.add_column(name, justify="right")
    for cell in cells:
        quality = []
        if measured:
            quality = [
                f"{cell['ppl']:.3f}", f"{100 * cell['ppl_change']:+.2f} %", f"{cell['kl_mean']:.2e}",
                f"{100 * cell['top1_agreement']:.2f} %",
            ]  # fmt: skip
        sizes = (f"{cell['weight_bytes'] / 1e6:,.2f}", f"{cell['kv_bytes_per_token']:,}")
        requests = f"{cell['max_concurrent_requests']:,}"
        table.add_row(
            cell["weights"], cell["kv"], *sizes, requests, *quality, f"{cell['tokens_per_second']:,.0f}"
        )
    show(table)
