"""Define the command line of `qrt-eval`. Each command's module is imported when the command runs."""

from __future__ import annotations

import math
import sys
from argparse import BooleanOptionalAction, Namespace
from importlib import import_module

from qrt.cli import ArgumentParser, add_download_dir, run_main
from qrt.quant.kv import KV_FORMATS
from qrt_eval import flags
from qrt_eval.inputs.preflight import preflight
from qrt_eval.speed.kernels.row import OPS


def parser() -> ArgumentParser:
    """Return the parser of the whole command line."""
    top = ArgumentParser(prog="qrt-eval", description="Measure what quantization costs, and what it buys.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_ppl(commands.add_parser("ppl", help="perplexity of a model, and of a baseline"))
    _add_kld(commands.add_parser("kld", help="divergence of a model's predictions from a baseline's"))
    _add_answers(commands.add_parser("answers", help="answers to chats that differ from a baseline's"))
    _add_lm(commands.add_parser("lm", help="tasks of lm-evaluation-harness"))
    _add_passkey(commands.add_parser("passkey", help="finding a key in a long context, per KV format"))
    _add_kv_error(
        commands.add_parser("kv-error", help="error of attention, per KV format and context length")
    )
    _add_sweep(commands.add_parser("sweep", help="all weight schemes and KV formats, with a report"))
    _add_latency(commands.add_parser("latency", help="prefill and decode times of a batch"))
    _add_throughput(commands.add_parser("throughput", help="tokens per second of many requests, offline"))
    _add_serve(commands.add_parser("serve", help="load on a running OpenAI-compatible server"))
    _add_compare(commands.add_parser("compare", help="what changed between two result files"))
    _add_kernels(commands.add_parser("kernels", help="time of every operator, beside its floor"))
    return top


def _add_ppl(command: ArgumentParser) -> None:
    flags.add_text(command, "to score", None, optional=False)
    flags.add_model(command)
    flags.add_kv(command)
    command.add_argument("--baseline", metavar="MODEL", help="also score this model (default: none)")
    flags.add_kv(command, "--baseline-kv", " of the baseline")
    flags.add_windows(command)
    flags.add_batch(command, 8, "windows")
    flags.add_json(command, resumes=True)


def _add_kld(command: ArgumentParser) -> None:
    flags.add_text(command, "to compare on (default: that of --base-file)", None, optional=True)
    flags.add_model(command, several=True)
    flags.add_kvs(command, ["auto"])
    base = command.add_mutually_exclusive_group()
    base.add_argument(
        "--baseline", metavar="MODEL", help="model to compare with (default: the first --model)"
    )
    base.add_argument(
        "--base-file", metavar="FILE", help="baseline and text that --save-base saved (default: none)"
    )
    flags.add_kv(command, "--baseline-kv", " of the baseline")
    command.add_argument(
        "--save-base",
        metavar="FILE",
        help="save the baseline's predictions for --base-file (default: no file)",
    )
    flags.add_windows(command)
    command.set_defaults(protocol=None)  # gptq, or that of --base-file
    command.add_argument(
        "--chunk", type=flags.positive, default=2048, metavar="TOKENS", help="tokens of a prefill step"
    )
    command.add_argument(
        "--top-p",
        type=flags.number("above 0 and at most 1", lambda p: 0 < p <= 1),
        default=0.9,
        metavar="P",
        help="probability of the nucleus in which flips are counted",
    )
    command.add_argument(
        "--worst", type=flags.integer(0), default=10, metavar="N", help="number of worst positions to print"
    )
    flags.add_json(command, resumes=True)


def _add_answers(command: ArgumentParser) -> None:
    flags.add_model(command, several=True)
    flags.add_kvs(command, ["auto"])
    command.add_argument(
        "--baseline", metavar="MODEL", help="model whose answers to compare with (default: the first --model)"
    )
    flags.add_kv(command, "--baseline-kv", " of the baseline")
    command.add_argument(
        "--prompts",
        metavar="FILE",
        help="one user message per line, or rows of prompts or chats (default: 20 that qrt brings)",
    )
    flags.add_limit(command, "conversations")
    command.add_argument(
        "--max-tokens", type=flags.positive, default=256, metavar="TOKENS", help="most tokens of an answer"
    )
    command.add_argument(
        "--near-tie",
        type=flags.above_0,
        default=0.1,
        metavar="NATS",
        help="a difference is a near tie if the baseline's two likeliest tokens are closer than this",
    )
    flags.add_dtype(command)
    flags.add_json(command)


def _add_lm(command: ArgumentParser) -> None:
    flags.add_model(command)
    flags.add_kv(command)
    flags.add_several(
        command, "--tasks", str, required=True, metavar="TASK", help="tasks, by their names in lm-eval"
    )
    command.add_argument(
        "--include-path", metavar="FOLDER", help="folder with more task YAML files (default: none)"
    )
    command.add_argument(
        "--num-fewshot",
        type=flags.integer(0),
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    flags.add_limit(command, "documents of each task")
    command.add_argument("--apply-chat-template", action="store_true", help="ask through the chat template")
    command.add_argument(
        "--max-model-len",
        type=flags.positive,
        metavar="TOKENS",
        help="most tokens of a request (default: the model's context)",
    )
    flags.add_dtype(command)
    flags.add_json(command)


def _add_passkey(command: ArgumentParser) -> None:
    flags.add_model(command)
    flags.add_kvs(command, list(KV_FORMATS))
    flags.add_context(command)
    flags.add_several(
        command,
        "--depth",
        flags.number("from 0 to 1", lambda depth: 0 <= depth <= 1),
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        metavar="D",
        help="share of the context that stands before the key",
    )
    command.add_argument(
        "--trials", type=flags.positive, default=4, metavar="N", help="keys per length and depth"
    )
    flags.add_dtype(command)
    flags.add_seed(command, "the keys")
    flags.add_json(command)


def _add_kv_error(command: ArgumentParser) -> None:
    flags.add_kvs(command, list(KV_FORMATS), ("bf16", *KV_FORMATS))
    flags.add_context(command, [1024, 8192, 32768, 131072])
    for name, default, what in (
        ("head-dim", 128, "channels of a head"),
        ("num-heads", 4, "query heads"),
        ("num-kv-heads", 1, "KV heads"),
    ):
        command.add_argument(f"--{name}", type=flags.positive, default=default, metavar="N", help=what)
    flags.add_seed(command, "the heads")
    flags.add_json(command)


def _add_sweep(command: ArgumentParser) -> None:
    flags.add_text(command, "to measure quality on", "pydoc", optional=True)
    flags.add_model_or_shape(command)
    flags.add_several(
        command,
        "--weights",
        str,
        default=["16", "8", "4", "w8a8"],
        metavar="SCHEME",
        help="weight schemes; 16, 8 and 4 stand for fp16, w8a16 and w4a16",
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
    command.add_argument(
        "--context",
        type=flags.positive,
        default=8192,
        metavar="TOKENS",
        help="length of each of those requests",
    )
    flags.add_batch(command, 32)
    flags.add_num_prompts(command, "requests per cell (default: twice the batch)")
    flags.add_lengths(command, 128, 64)
    flags.add_repeats(command)
    flags.add_seed(command, "the random prompts")


def _add_model_or_shape(command: ArgumentParser) -> None:
    flags.add_model_or_shape(command)
    text = "weight scheme of --shape's layers (default: w4a16)"
    command.add_argument("--weights", type=str, metavar="SCHEME", help=text)
    command.add_argument(
        "--head-bits",
        type=int,
        choices=(8, 16),
        help="bits of the head with --shape; 8 is int8 (default: 16)",
    )
    flags.add_kv(command)


def _add_latency(command: ArgumentParser) -> None:
    _add_model_or_shape(command)
    flags.add_batch(command, [1])
    flags.add_lengths(command, 1024, 64)
    command.add_argument(
        "--compare",
        action="store_true",
        help="also time transformers in bf16, in the same run; needs --shape",
    )
    flags.add_json(command)


def _add_throughput(command: ArgumentParser) -> None:
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
    flags.add_num_prompts(command, text)
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


def _add_serve(command: ArgumentParser) -> None:
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
    command.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="folder or ORG/NAME of the tokenizer for the prompts (default: the model's)",
    )
    add_download_dir(command)
    text = "bearer token; visible in the process list, so prefer QRT_API_KEY (default: QRT_API_KEY's)"
    command.add_argument("--api-key", metavar="KEY", help=text)
    command.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help=f"{flags.LENGTHS}; sets --ignore-eos (default: --input-len and --output-len)",
    )
    flags.add_num_prompts(command, "requests in all (default: 1000; long 64, FILE all)")
    flags.add_requests(command)
    command.add_argument(
        "--ignore-eos", action="store_true", help="ask for all output tokens, even after end-of-text"
    )
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
    command.add_argument(
        "--max-concurrency",
        type=flags.positive,
        metavar="N",
        help="most requests at once (default: no limit)",
    )
    command.add_argument(
        "--processes",
        type=flags.positive,
        default=1,
        metavar="N",
        help="processes that send requests and read answers",
    )
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
    flags.add_seed(command, "prompts and arrivals")
    flags.add_json(command)


def _add_compare(command: ArgumentParser) -> None:
    command.add_argument("results", nargs=2, metavar="RESULT.json", help="result files, before and after")
    command.add_argument(
        "--sigmas",
        type=flags.number("of at least 0", lambda value: 0 <= value < math.inf),
        default=2.0,
        metavar="S",
        help="differences below this many standard errors are treated as noise",
    )


def _add_kernels(command: ArgumentParser) -> None:
    text = f"operators: {', '.join(OPS)} (default: all)"
    flags.add_several(command, "--op", flags.one_of(OPS), metavar="OP", help=text)
    flags.add_shape(command, "llama-3-8b")
    flags.add_several(
        command,
        "--tokens",
        flags.positive,
        metavar="T",
        help="tokens per step (default: 1 16 64 256 4096)",
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
    flags.add_several(
        command,
        "--tune",
        flags.one_of(list(flags.SHAPES)),
        metavar="SHAPE",
        help="instead, find the best block sizes for the products of these models (default: none)",
    )
    flags.add_json(command)


COMMANDS = {
    "ppl": "qrt_eval.quality.ppl",
    "kld": "qrt_eval.quality.kld",
    "answers": "qrt_eval.quality.answers",
    "lm": "qrt_eval.quality.lm",
    "passkey": "qrt_eval.quality.passkey",
    "kv-error": "qrt_eval.quality.kv_error",
    "sweep": "qrt_eval.sweep",
    "latency": "qrt_eval.speed.latency",
    "throughput": "qrt_eval.speed.throughput",
    "serve": "qrt_eval.speed.serve",
    "compare": "qrt_eval.reports.compare",
    "kernels": "qrt_eval.speed.kernels.run",
}


def main(argv: list[str] | None = None) -> int:
    """Run `qrt-eval`; return the exit code."""
    arguments = parser().parse_args(argv)
    return run_main(lambda: _run(arguments))


def _run(arguments: Namespace) -> None:
    preflight(arguments)
    import_module(COMMANDS[arguments.command]).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
