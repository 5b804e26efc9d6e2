"""`qrt-eval`: the command line of the evaluators; each command's module is imported when it runs."""

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
    """The whole command line."""
    top = ArgumentParser(prog="qrt-eval", description="What quantization cost, and what it bought.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_ppl(commands.add_parser("ppl", help="perplexity of a model, beside a baseline"))
    _add_kld(commands.add_parser("kld", help="divergence of a model's distributions from a baseline's"))
    _add_answers(commands.add_parser("answers", help="answers to chats, where they leave a baseline's"))
    _add_lm(commands.add_parser("lm", help="tasks of lm-evaluation-harness"))
    _add_passkey(commands.add_parser("passkey", help="a key found again in a long context, by KV format"))
    _add_kv_error(commands.add_parser("kv-error", help="error of attention, by KV format and context"))
    _add_sweep(commands.add_parser("sweep", help="all weight schemes and KV formats, with a report"))
    _add_latency(commands.add_parser("latency", help="prefill and decode times of a batch"))
    _add_throughput(commands.add_parser("throughput", help="tokens per second of many requests, offline"))
    _add_serve(commands.add_parser("serve", help="load on a running OpenAI-compatible server"))
    _add_compare(commands.add_parser("compare", help="what changed between two result files"))
    _add_kernels(commands.add_parser("kernels", help="every operator beside its floor"))
    return top


def _add_ppl(command: ArgumentParser) -> None:
    flags.add_text(command, "to score", None, optional=False)
    flags.add_model(command)
    flags.add_kv(command)
    command.add_argument("--baseline", metavar="MODEL", help="also score this one (default: none)")
    flags.add_kv(command, "--baseline-kv", " of the baseline")
    flags.add_windows(command)
    flags.add_batch(command, 8, "windows")
    flags.add_json(command, resumes=True)


def _add_kld(command: ArgumentParser) -> None:
    flags.add_text(command, "to compare on (default: that of --base-file)", None, optional=True)
    flags.add_model(command, several=True)
    flags.add_kvs(command, ["auto"])
    base = command.add_mutually_exclusive_group()
    base.add_argument("--baseline", metavar="MODEL", help="what to compare with (default: the first --model)")
    base.add_argument(
        "--base-file", metavar="FILE", help="a baseline saved by --save-base, and its text (default: none)"
    )
    flags.add_kv(command, "--baseline-kv", " of the baseline")
    command.add_argument(
        "--save-base",
        metavar="FILE",
        help="keep the baseline's distributions for --base-file (default: no file)",
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
        help="probability of the nucleus whose flips are counted",
    )
    command.add_argument(
        "--worst", type=flags.integer(0), default=10, metavar="N", help="worst positions to show"
    )
    flags.add_json(command, resumes=True)


def _add_answers(command: ArgumentParser) -> None:
    flags.add_model(command, several=True)
    flags.add_kvs(command, ["auto"])
    command.add_argument(
        "--baseline", metavar="MODEL", help="whose answers to compare with (default: the first --model)"
    )
    flags.add_kv(command, "--baseline-kv", " of the baseline")
    command.add_argument(
        "--prompts",
        metavar="FILE",
        help="a user's message a line, or rows of prompts or chats (default: 20 of qrt's own)",
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
        help="count a difference apart where the baseline's two likeliest tokens are closer than this",
    )
    flags.add_dtype(command)
    flags.add_json(command)


def _add_lm(command: ArgumentParser) -> None:
    flags.add_model(command)
    flags.add_kv(command)
    flags.add_several(command, "--tasks", str, required=True, metavar="TASK", help="by lm-eval's names")
    command.add_argument("--include-path", metavar="FOLDER", help="further task YAML files (default: none)")
    command.add_argument(
        "--num-fewshot",
        type=flags.integer(0),
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    flags.add_limit(command, "documents of each task")
    command.add_argument("--apply-chat-template", action="store_true", help="ask as a conversation")
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
        help="where the key is: share of the context before it",
    )
    command.add_argument("--trials", type=flags.positive, default=4, metavar="N", help="keys at each place")
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
    flags.add_text(command, "to take the quality on", "pydoc", optional=True)
    flags.add_model_or_shape(command)
    flags.add_several(
        command,
        "--weights",
        str,
        default=["16", "8", "4", "w8a8"],
        metavar="SCHEME",
        help="weight schemes; 16, 8 and 4 are short for fp16, w8a16 and w4a16",
    )
    flags.add_kvs(command, ["fp16", "int8", "int4"], list(KV_FORMATS))
    command.add_argument(
        "--checkpoint",
        action="extend",
        nargs="+",
        default=[],
        metavar="SCHEME=MODEL",
        help="checkpoints to take (default: qrt-calibrate makes them)",
    )
    command.add_argument("--out", metavar="FOLDER", help="where everything goes (default: sweep-NAME)")
    flags.add_windows(command, seqlen=1024, limit=16)
    command.add_argument(
        "--memory-gib", type=flags.above_0, default=80.0, metavar="GIB", help="memory that requests share"
    )
    command.add_argument(
        "--context", type=flags.positive, default=8192, metavar="TOKENS", help="length of each of them"
    )
    flags.add_batch(command, 32)
    flags.add_num_prompts(command, "requests of each cell (default: twice the batch)")
    flags.add_lengths(command, 128, 64)
    flags.add_repeats(command)
    flags.add_seed(command, "the random prompts")


def _add_model_or_shape(command: ArgumentParser) -> None:
    flags.add_model_or_shape(command)
    text = "weight scheme of --shape's layers (default: w4a16)"
    command.add_argument("--weights", type=str, metavar="SCHEME", help=text)
    command.add_argument(
        "--head-bits", type=int, choices=(8, 16), help="bits of --shape's head; 8 is int8 (default: 16)"
    )
    flags.add_kv(command)


def _add_latency(command: ArgumentParser) -> None:
    _add_model_or_shape(command)
    flags.add_batch(command, [1])
    flags.add_lengths(command, 1024, 64)
    command.add_argument(
        "--compare", action="store_true", help="time transformers in bf16 too, in the same run; with --shape"
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
    text = "requests (default: twice the batch; sharegpt 1000, long 64, IN/OUT thrice what runs, FILE all)"
    flags.add_num_prompts(command, text)
    flags.add_requests(command)
    flags.add_limits(command)
    command.add_argument(
        "--window",
        action=BooleanOptionalAction,
        help="begin as a load that has always been running, and take the rate while requests wait (default: "
        "for IN/OUT)",
    )
    command.add_argument(
        "--window-seconds",
        type=flags.above_0,
        metavar="S",
        help="most of a window, from when the first requests all decode; the rest is dropped then "
        "(default: 30)",
    )
    flags.add_repeats(command, None, " (default: 1 of --lengths, 3 of --batch)")
    flags.add_seed(command, "lengths and random prompts")
    flags.add_json(command)


def _add_serve(command: ArgumentParser) -> None:
    command.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="of the server")
    command.add_argument(
        "--endpoint", default="/v1/completions", metavar="PATH", help="or /v1/chat/completions"
    )
    command.add_argument("--model", metavar="NAME", help="as the server names it (default: its first)")
    command.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="folder or ORG/NAME of the tokenizer that makes the prompts (default: the model's)",
    )
    add_download_dir(command)
    command.add_argument("--api-key", metavar="KEY", help="sent as a bearer token (default: QRT_API_KEY)")
    command.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help=f"{flags.LENGTHS}, and --ignore-eos (default: --input-len and --output-len)",
    )
    flags.add_num_prompts(command, "requests in all (default: 1000; long 64, FILE all)")
    flags.add_requests(command)
    command.add_argument(
        "--ignore-eos", action="store_true", help="ask for all output tokens, whatever they are"
    )
    command.add_argument(
        "--temperature",
        type=flags.number("of at least 0", lambda value: 0 <= value < math.inf),
        default=0.0,
        metavar="T",
        help="0 is greedy",
    )
    command.add_argument(
        "--request-rate",
        type=flags.number("above 0, or inf", lambda rate: rate > 0),
        default=math.inf,
        metavar="R",
        help="requests a second",
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
        "--processes", type=flags.positive, default=1, metavar="N", help="processes that send and read"
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
        help="objectives in milliseconds, e.g. ttft:500 tpot:50 (default: none)",
    )
    command.add_argument("--save-detailed", action="store_true", help="every request's times in the JSON too")
    flags.add_seed(command, "prompts and arrivals")
    flags.add_json(command)


def _add_compare(command: ArgumentParser) -> None:
    command.add_argument("results", nargs=2, metavar="RESULT.json", help="before and after")
    command.add_argument(
        "--sigmas",
        type=flags.number("of at least 0", lambda value: 0 <= value < math.inf),
        default=2.0,
        metavar="S",
        help="standard errors that count for nothing",
    )


def _add_kernels(command: ArgumentParser) -> None:
    text = f"operators, of {', '.join(OPS)} (default: all)"
    flags.add_several(command, "--op", flags.one_of(OPS), metavar="OP", help=text)
    flags.add_shape(command, "llama-3-8b")
    flags.add_several(
        command,
        "--tokens",
        flags.positive,
        metavar="T",
        help="tokens of a step (default: 1 16 64 256 4096)",
    )
    flags.add_several(
        command,
        "--decode",
        flags.pair(1),
        metavar="BxL",
        help="batch and context of decode attention, and of a layer (default: some of 1x1024 to 256x1024)",
    )
    flags.add_several(
        command,
        "--prefill",
        flags.pair(0),
        metavar="TxP",
        help="chunk and cached prefix of prefill attention (default: 4096x0 4096x28672)",
    )
    command.add_argument("--compare", action="store_true", help="time other tools' operators beside them")
    flags.add_several(
        command,
        "--tune",
        flags.one_of(list(flags.SHAPES)),
        metavar="SHAPE",
        help="find the block sizes of these models' products instead (default: none)",
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
    """Entry point of `qrt-eval`; returns the exit code."""
    arguments = parser().parse_args(argv)
    return run_main(lambda: _run(arguments))


def _run(arguments: Namespace) -> None:
    preflight(arguments)
    import_module(COMMANDS[arguments.command]).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
