"""Time prefill and decode of a batch in the engine: `qrt-eval latency`.

decode_ms_per_step is the median time between the tokens of two steps, over steps in which every request
decodes one token. Its floor is the time the memory takes to read what the step must read: all weights once,
and every request's K/V once. On a GPU, host_gap is the share of that time in which the GPU waits for the
host. `--compare` also times transformers in the same run.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.errors import ConfigError
from qrt.gc import short_collections
from qrt.layers.experts import ExpertLinear
from qrt.model.decoder import Decoder
from qrt.model_files.location import model_name
from qrt.request.sampling import SamplingParams
from qrt_eval.inputs.shapes import shape, write_folder
from qrt_eval.results.console import show
from qrt_eval.results.record import engine_facts, save
from qrt_eval.speed.feed import step

# Bytes read and written by a copy on the device, as `qrt-eval kernels` measures; other GPUs get no floor.
COPY_BYTES_PER_S = {"NVIDIA H200": 4.3e12, "NVIDIA H100 80GB HBM3": 3.02e12}
DEFAULT_WEIGHTS = "w4a16"  # for --shape
READ_BYTES = 1 << 30  # read to measure a CPU's bandwidth; far larger than its caches


def run(arguments: Namespace) -> None:
    """Run `qrt-eval latency`: build the engine once, time each batch size; write the JSON, print a table."""
    if arguments.compare and not arguments.shape:
        raise ConfigError("--compare: expected --shape, as transformers gets random weights, got --model")
    rate = bytes_per_s()
    length = arguments.input_len + arguments.output_len
    engine = build_engine(arguments, max_model_len=length, max_num_seqs=max(arguments.batch))
    rows = []
    for batch in arguments.batch:
        measure(engine, batch, arguments, rate)  # compiles kernels; not reported
        rows.append(measure(engine, batch, arguments, rate))
    if arguments.compare:
        rows += compared(arguments, engine.model.device, rate)
    facts = engine_facts(engine, arguments.model or arguments.shape)
    save(arguments, {**facts, "bytes_per_s": rate, "rows": rows})
    print_table(arguments, rows)


def build_engine(arguments: Namespace, **limits: Any) -> Engine:
    """Build an engine over a checkpoint, or over random weights of a known shape.

    `limits` are fields of EngineConfig. ConfigError for a flag of shapes beside a checkpoint.
    """
    for given, flag in (
        (arguments.weights, "--weights"),
        (arguments.head_bits, "--head-bits"),
    ):
        if given and not arguments.shape:
            raise ConfigError(f"{flag}: expected --shape beside it, got a checkpoint; leave the flag out")
    ranks = arguments.tensor_parallel_size
    shared = {
        name: getattr(arguments, name) for name in ("tensor_parallel_size", "all_reduce", "all_reduce_dtype")
    }
    own = {"kv": arguments.kv, "enable_prefix_caching": False, **shared, **limits}
    if not arguments.shape:
        engine = Engine(EngineConfig(arguments.model, **own))
    else:
        arguments.weights, head_bits = arguments.weights or DEFAULT_WEIGHTS, arguments.head_bits or 16
        model = arguments.shape, arguments.weights, head_bits
        if ranks == 1:
            engine = Engine(EngineConfig(arguments.shape, **own), random_decoder(*model))
        else:  # each rank makes its part
            engine = _of_folder(*model, own)
    gc.collect()  # the server does so too; later it would take 0.1 s of a step
    return engine


def _of_folder(name: str, scheme: str, head_bits: int, settings: dict[str, Any]) -> Engine:
    """Build an engine over random weights of the shape `name`, from a folder that has only its config."""
    with tempfile.TemporaryDirectory(prefix="qrt-") as folder:
        write_folder(name, scheme, Path(folder), head_bits)
        return Engine(EngineConfig(folder, load_format="dummy", dtype="bfloat16", **settings))


def random_decoder(name: str, scheme: str, head_bits: int = 16) -> Decoder:
    """Make random weights of the shape `name`, with activations in bf16, on the GPU if there is one."""
    from qrt.model.random import random_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return random_model(shape(name), scheme, head_bits=head_bits, device=device, dtype=torch.bfloat16)


@short_collections()
def measure(engine: Engine, batch: int, arguments: Namespace, rate: float | None) -> dict[str, Any]:
    """Time `batch` random prompts of `input_len` tokens that each decode `output_len` tokens greedily."""
    input_len, output_len = arguments.input_len, arguments.output_len
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    prompts = torch.randint(0, engine.model.arch.vocab_size, (batch, input_len)).tolist()
    for index, prompt in enumerate(prompts):
        engine.add(f"{batch}-{index}", prompt, params)
    timeline = engine.start_timeline() if engine.model.device.type == "cuda" else None
    prefill_s, steps_s = 0.0, []
    first: set[str] = set()
    started = last = time.perf_counter()
    while engine.has_work:  # requests that decode first also finish first
        deltas = step(engine)
        if not deltas:  # a step was launched, but none has ended yet
            continue
        now = time.perf_counter()
        if len(first) < batch:
            prefill_s = now - started
            first |= {delta.request_id for delta in deltas if delta.token_ids}
        elif len(deltas) == batch:
            steps_s.append(now - last)
        last = now
    if not steps_s:
        raise ConfigError(
            f"--output-len: expected enough tokens for all {batch} requests to decode at once, got "
            f"{output_len}; give more, or a smaller --batch"
        )
    row = summary(batch, input_len, output_len, prefill_s, steps_s)
    row["host_gap"] = timeline.summary()["decode_host_gap"] if timeline else None
    kv_bytes = batch * engine.kv_bytes_read(input_len + output_len // 2)
    return row | floor(weight_bytes(engine.model, batch), kv_bytes, rate)


def weight_bytes(model: Decoder, tokens: int) -> float:
    """Return the bytes that a step of `tokens` tokens reads of weights: every Linear, with the head.

    Of experts it reads those that are chosen. Where any is as likely as another that is a share of
    1 - (1 - k / E)^tokens of them.
    """
    found = 0.0
    for linear in model.linears():
        read = float(sum(tensor.nbytes for tensor in linear.parameters()))
        if isinstance(linear, ExpertLinear) and (experts := model.arch.experts) is not None:
            read *= 1 - (1 - experts.router.top_k / experts.count) ** tokens
        found += read
    return found


def compared(arguments: Namespace, device: torch.device, rate: float | None) -> list[dict[str, Any]]:
    """Return the rows of transformers in bf16."""
    from qrt_eval.speed import transformers_latency as other

    model = other.random_transformer(arguments.shape, device)
    rows = []
    for batch in arguments.batch:
        lengths = batch, arguments.input_len, arguments.output_len
        other.time_steps(model, *lengths)  # compiles; not reported
        row = summary(*lengths, *other.time_steps(model, *lengths))
        kv_bytes = batch * (row["input_len"] + row["output_len"] // 2) * other.kv_bytes_per_token(model)
        row |= floor(other.weight_bytes(model), kv_bytes, rate)
        rows.append({"by": "transformers", "weights": "bf16", "kv": "bf16", **row})
    return rows


def summary(
    batch: int, input_len: int, output_len: int, prefill_s: float, steps_s: list[float]
) -> dict[str, Any]:
    """Return one row of the result: times and rates."""
    decode_s = statistics.median(steps_s)
    return {
        "batch": batch,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_tokens_per_s": batch * input_len / prefill_s,
        "time_to_first_tokens_s": prefill_s,
        "decode_ms_per_step": decode_s * 1e3,
        "decode_ms_p99": float(np.percentile(steps_s, 99)) * 1e3,
        "decode_tokens_per_s": batch / decode_s,
    }


def floor(weight_bytes: float, kv_bytes: float, rate: float | None) -> dict[str, Any]:
    """Return what a decode step reads, and how long the memory alone takes for that."""
    return {
        "kv_bytes_per_step": kv_bytes,
        "weight_bytes_per_step": round(weight_bytes),
        "floor_ms": (weight_bytes + kv_bytes) / rate * 1e3 if rate else None,
    }


def bytes_per_s() -> float | None:
    """Return the bandwidth of the memory.

    A GPU's comes from a table; a CPU's is the best of some sums over a large tensor.
    """
    if torch.cuda.is_available():
        return COPY_BYTES_PER_S.get(torch.cuda.get_device_name())
    memory, times_s = torch.ones(READ_BYTES // 4), []
    for _ in range(10):
        started = time.perf_counter()
        memory.sum()
        times_s.append(time.perf_counter() - started)
    return READ_BYTES / min(times_s)


def described(arguments: Namespace) -> str:
    """Return what runs: the checkpoint, or the shape with its weights."""
    head = f", head of {arguments.head_bits} bits" if arguments.head_bits else ""
    return model_name(arguments.model) if arguments.model else f"{arguments.shape} {arguments.weights}{head}"


def print_table(arguments: Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the rows."""
    table = Table(title=f"{described(arguments)}, KV {arguments.kv}, {rows[0]['input_len']} tokens in")
    for column in ("by", "batch", "prefill tokens/s", "decode ms/step", "floor ms", "decode tokens/s"):
        table.add_column(column, justify="left" if column == "by" else "right")
    for row in rows:
        floor_ms = "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}"
        table.add_row(
            f"{row['by']} {row['weights']}" if "by" in row else "qrt",
            str(row["batch"]),
            f"{row['prefill_tokens_per_s']:,.0f}",
            f"{row['decode_ms_per_step']:.2f}",
            floor_ms,
            f"{row['decode_tokens_per_s']:,.1f}",
        )
    show(table)
