"""Define the flags of the commands that measure speed, and of the sweep."""

from __future__ import annotations

import math
from argparse import BooleanOptionalAction

from qrt.cli import ArgumentParser, add_flags
from qrt.config import EngineConfig
from qrt.quant.kv import KV_FORMATS
from qrt_eval.flags import shared as flags
from qrt_eval.speed.kernels.row import OPS


def add_sweep(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval sweep`."""
    flags.add_text(command, "to measure quality on", "pydoc", optional=True)
    flags.add_model_or_shape(command)
    flags.add_several(
        command,
        "--weights",
        str,
        default=["16", "8", "4", "w8a8", "w4a8"],
        metavar="SCHEME",
        help="weight schemes; 16, 8 and 4 stand for those that round weights alone to so many bits",
    )
    flags.add_kvs(command, ["fp16", "int8", "int4"], list(KV_FORMATS))
    command.add_argument(
        "--checkpoint",
        action="extend",
        nargs="+",
        default=[],
        metavar="SCHEME=MODEL",
        help="use these checkpoints (default: qrt-calibrate makes them)",
    )
    command.add_argument("--out", metavar="FOLDER", help="folder for the results (default: sweep-NAME)")
    flags.add_windows(command, seqlen=1024, limit=16)
    command.add_argument(
        "--memory-gib",
        type=flags.above_0,
        default=80.0,
        metavar="GIB",
        help="GPU memory of the server, to count the requests that fit",
    )
    flags.add_count(command, "--context", "TOKENS", "length of each of those requests", 8192)
    flags.add_batch(command, 32)
    flags.add_count(command, "--num-prompts", "N", "requests per cell (default: twice the batch)")
    flags.add_lengths(command, 128, 64)
    flags.add_repeats(command)
    flags.add_seed(command, "the random prompts")


def add_latency(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval latency`."""
    _add_model_or_shape(command)
    text = "requests that run at once"
    flags.add_several(command, "--batch", flags.positive, default=[1], metavar="N", help=text)
    flags.add_lengths(command, 1024, 64)
    command.add_argument(
        "--compare",
        action="store_true",
        help="also time transformers in bf16, in the same run; needs --shape",
    )
    flags.add_json(command)


def add_throughput(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval throughput`."""
    _add_model_or_shape(command)
    flags.add_several(
        command,
        "--lengths",
        str,
        metavar="LENGTHS",
        help=f"hand in all requests at once, a row for each of {flags.LENGTHS} (default: --batch in flight)",
    )
    flags.add_several(
        command,
        "--batch",
        flags.positive,
        metavar="N",
        help="requests in flight, without --lengths (default: 1 8 32)",
    )
    text = "requests (default: twice the batch; sharegpt 1000, long 64, IN/OUT 3x what runs, FILE all)"
    flags.add_count(command, "--num-prompts", "N", text)
    flags.add_requests(command)
    flags.add_limits(command)
    command.add_argument(
        "--window",
        action=BooleanOptionalAction,
        help="begin like a load that has always been running, and measure while requests wait (default: for "
        "IN/OUT)",
    )
    command.add_argument(
        "--window-seconds",
        type=flags.above_0,
        metavar="S",
        help="longest window, from when all first requests decode; then the rest is dropped (default: 30)",
    )
    flags.add_repeats(command, None, " (default: 1 with --lengths, 3 with --batch)")
    flags.add_seed(command, "lengths and random prompts")
    flags.add_json(command)


def add_serve(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval serve`."""
    command.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="address of the server"
    )
    command.add_argument(
        "--endpoint",
        default="/v1/completions",
        metavar="PATH",
        help="path of the API; /v1/chat/completions sends chats",
    )
    command.add_argument(
        "--model", metavar="NAME", help="model, by the server's name for it (default: the server's first)"
    )
    add_flags(command, EngineConfig, "tokenizer download_dir")
    text = "bearer token; visible in the process list, so prefer QRT_API_KEY (default: QRT_API_KEY's)"
    command.add_argument("--api-key", metavar="KEY", help=text)
    command.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help=f"{flags.LENGTHS}; sets --ignore-eos (default: --input-len and --output-len)",
    )
    flags.add_count(command, "--num-prompts", "N", "requests in all (default: 1000; long 64, FILE all)")
    flags.add_requests(command)
    command.add_argument(
        "--ignore-eos", action="store_true", help="ask for all output tokens, even after end-of-text"
    )
    _add_arrivals(command)
    _add_metrics(command)
    flags.add_seed(command, "prompts and arrivals")
    flags.add_json(command)


def _add_arrivals(command: ArgumentParser) -> None:
    """Add how requests are sampled, and when they are sent."""
    command.add_argument(
        "--temperature",
        type=flags.number("of at least 0", lambda value: 0 <= value < math.inf),
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 is greedy",
    )
    command.add_argument(
        "--request-rate",
        type=flags.number("above 0, or inf", lambda rate: rate > 0),
        default=math.inf,
        metavar="R",
        help="requests per second",
    )
    command.add_argument(
        "--burstiness",
        type=flags.above_0,
        default=1.0,
        metavar="B",
        help="1 is a Poisson process, less is burstier",
    )
    flags.add_count(command, "--max-concurrency", "N", "most requests at once (default: no limit)")
    flags.add_count(command, "--processes", "N", "processes that send requests and read answers", 1)


def _add_metrics(command: ArgumentParser) -> None:
    """Add what is reported about the requests."""
    flags.add_several(
        command,
        "--metric-percentiles",
        flags.number("between 0 and 100", lambda p: 0 < p < 100),
        default=[99.0],
        metavar="P",
        help="percentiles of each time to report",
    )
    command.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="count requests that meet these times, e.g. ttft:500 tpot:50 (default: none)",
    )
    command.add_argument(
        "--save-detailed", action="store_true", help="also write every request's times to the JSON"
    )


def add_kernels(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval kernels`."""
    text = f"operators: {', '.join(OPS)} (default: all)"
    flags.add_several(command, "--op", flags.one_of(OPS), metavar="OP", help=text)
    flags.add_shape(command, "llama-3-8b")
    flags.add_several(
        command,
        "--tokens",
        flags.positive,
        metavar="T",
        help="tokens per step (default: 1 16 64 256 4096; with --explain those of all recorded steps)",
    )
    flags.add_several(
        command,
        "--decode",
        flags.pair(1),
        metavar="BxL",
        help="batch and context of decode attention and layers (default: some from 1x1024 to 256x1024)",
    )
    flags.add_several(
        command,
        "--prefill",
        flags.pair(0),
        metavar="TxP",
        help="chunk and cached prefix of prefill attention (default: 4096x0 4096x28672)",
    )
    command.add_argument("--compare", action="store_true", help="also time other projects' operators")
    instead = command.add_mutually_exclusive_group()
    instead.add_argument(
        "--explain",
        action="store_true",
        help="instead, print which kernel runs each product, and why, by tokens per step",
    )
    command.add_argument("--model", help=f"with --explain, instead of --shape: {flags.EXPECTED}")
    add_flags(command, EngineConfig, "revision download_dir")
    flags.add_several(
        instead,
        "--tune",
        flags.one_of(list(flags.SHAPES)),
        metavar="SHAPE",
        help="instead, find the best block sizes for the products of these models (default: none)",
    )
    flags.add_json(command)


def add_grammar(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval grammar`."""
    command.add_argument(
        "schemas", metavar="FOLDER", help="files of MaskBench (jsonschemabench), or JSON schemas"
    )
    text = "folder or ORG/NAME of the tokenizer"
    add_flags(command, EngineConfig, "tokenizer", default="tiny", help=text)
    add_flags(command, EngineConfig, "download_dir")
    flags.add_count(command, "--vocab-size", "N", "logits of the model (default: the tokenizer's ids)")
    flags.add_limit(command, "schemas, drawn by --seed")
    flags.add_seed(command, "the schemas that --limit takes")
    flags.add_json(command)


def _add_model_or_shape(command: ArgumentParser) -> None:
    """Add --model, or --shape with the weights and the head of its random model; and --kv."""
    flags.add_model_or_shape(command)
    text = "weight scheme of --shape's layers (default: w4a16)"
    command.add_argument("--weights", type=str, metavar="SCHEME", help=text)
    command.add_argument(
        "--head-bits",
        type=int,
        choices=(8, 16),
        help="bits of the head with --shape; 8 is int8 (default: 16)",
    )
    add_flags(command, EngineConfig, "tensor_parallel_size", type=flags.positive)
    add_flags(command, EngineConfig, "all_reduce all_reduce_dtype")
    flags.add_kv(command)
