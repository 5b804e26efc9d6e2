"""`qrt-eval`: the command line of the evaluators; each command's module is imported when it runs."""

from __future__ import annotations

import sys
from importlib import import_module

from qrt.cli import ArgumentParser, run_main
from qrt_eval import flags

OPS = ("layer", "chain", "linear", "decode", "prefill", "kv_write", "elementwise", "sample")


def parser() -> ArgumentParser:
    """The whole command line."""
    top = ArgumentParser(prog="qrt-eval", description="What quantization cost, and what it bought.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    flags.add_ppl(commands.add_parser("ppl", help="perplexity of a model, beside a baseline"))
    flags.add_kld(commands.add_parser("kld", help="divergence of a model's distributions from a baseline's"))
    flags.add_lm(commands.add_parser("lm", help="tasks of lm-evaluation-harness"))
    flags.add_passkey(
        commands.add_parser("passkey", help="a key found again in a long context, by KV format")
    )
    flags.add_kv_error(commands.add_parser("kv-error", help="error of attention, by KV format and context"))
    flags.add_sweep(commands.add_parser("sweep", help="all weight schemes and KV formats, with a report"))
    _add_latency(commands.add_parser("latency", help="prefill and decode times of a batch"))
    _add_throughput(commands.add_parser("throughput", help="tokens per second of many requests, offline"))
    _add_serve(commands.add_parser("serve", help="load on a running OpenAI-compatible server"))
    _add_compare(commands.add_parser("compare", help="what changed between two result files"))
    _add_kernels(commands.add_parser("kernels", help="every operator beside its floor"))
    return top


def _add_model_or_shape(command: ArgumentParser) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="checkpoint folder, or 'tiny'")
    source.add_argument("--shape", help="random weights of a known shape, e.g. llama-3-8b")
    command.add_argument("--weights", help="weight scheme of --shape (default: w4a16)")
    command.add_argument(
        "--head-bits", type=int, choices=(8, 16), help="of --shape's head: 8 is int8 (default: 16)"
    )
    flags.add_kv(command)


def _add_latency(command: ArgumentParser) -> None:
    _add_model_or_shape(command)
    command.add_argument(
        "--batch", type=flags.positive, nargs="+", default=[1], metavar="B", help="requests at once"
    )
    command.add_argument(
        "--input-len", type=flags.positive, default=1024, metavar="TOKENS", help="prompt length"
    )
    command.add_argument(
        "--output-len", type=flags.positive, default=64, metavar="TOKENS", help="tokens to decode"
    )
    command.add_argument(
        "--compare", action="store_true", help="time transformers in bf16 too, in the same run; with --shape"
    )
    flags.add_json(command)


def _add_throughput(command: ArgumentParser) -> None:
    _add_model_or_shape(command)
    command.add_argument(
        "--batch", type=flags.positive, nargs="+", default=[1, 8, 32], metavar="B", help="requests at once"
    )
    command.add_argument(
        "--num-prompts", type=flags.positive, metavar="N", help="of each batch size (default: twice it)"
    )
    command.add_argument(
        "--prompts", metavar="FILE", help="a prompt a line, or .jsonl (default: random tokens)"
    )
    command.add_argument(
        "--input-len", type=flags.positive, default=1024, metavar="TOKENS", help="of random prompts"
    )
    command.add_argument(
        "--output-len", type=flags.positive, default=128, metavar="TOKENS", help="tokens to decode"
    )
    command.add_argument(
        "--repeats", type=flags.positive, default=3, metavar="N", help="the median counts (default: 3)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the random prompts")
    flags.add_json(command)


def _add_serve(command: ArgumentParser) -> None:
    command.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="of the server")
    command.add_argument(
        "--endpoint", default="/v1/completions", metavar="PATH", help="or /v1/chat/completions"
    )
    command.add_argument("--model", metavar="NAME", help="as the server names it (default: its first)")
    command.add_argument("--tokenizer", metavar="DIR", help="makes the prompts (default: the model)")
    command.add_argument("--api-key", help="sent as a bearer token (default: QRT_API_KEY)")
    command.add_argument(
        "--num-prompts", type=flags.positive, default=1000, metavar="N", help="requests in all"
    )
    command.add_argument(
        "--prompts", metavar="FILE", help="a prompt a line, or .jsonl (default: random tokens)"
    )
    command.add_argument(
        "--input-len", type=flags.positive, default=1024, metavar="TOKENS", help="of random prompts"
    )
    command.add_argument(
        "--output-len", type=flags.positive, default=128, metavar="TOKENS", help="most to ask for"
    )
    command.add_argument("--ignore-eos", action="store_true", help="ask the server for all of them")
    command.add_argument("--temperature", type=float, default=0.0, help="(default: greedy)")
    command.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="requests a second (default: inf)",
    )
    command.add_argument(
        "--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier"
    )
    command.add_argument("--max-concurrency", type=flags.positive, metavar="C", help="most requests at once")
    command.add_argument(
        "--processes",
        type=flags.positive,
        default=1,
        metavar="N",
        help="that send and read (default: %(default)s)",
    )
    command.add_argument(
        "--metric-percentiles", type=float, nargs="+", default=[99.0], metavar="P", help="(default: 99)"
    )
    command.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="objectives, e.g. ttft:500 tpot:50"
    )
    command.add_argument("--save-detailed", action="store_true", help="every request's times in the JSON too")
    command.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    flags.add_json(command)


def _add_compare(command: ArgumentParser) -> None:
    command.add_argument("results", nargs=2, metavar="RESULT.json", help="before and after")
    command.add_argument(
        "--sigmas", type=float, default=2.0, metavar="S", help="noise that counts for nothing (default: 2)"
    )


def _add_kernels(command: ArgumentParser) -> None:
    command.add_argument("--op", nargs="+", choices=OPS, help="operators (default: all)")
    command.add_argument("--shape", default="llama-3-8b", help="sizes of this model (default: llama-3-8b)")
    command.add_argument("--tokens", type=int, nargs="+", metavar="T", help="tokens of a step")
    command.add_argument("--decode", nargs="+", metavar="BxL", help="batch and context of decode attention")
    command.add_argument("--prefill", nargs="+", metavar="TxP", help="chunk and cached prefix of prefill")
    command.add_argument("--compare", action="store_true", help="time torch's own operators beside them")
    command.add_argument(
        "--tune", nargs="+", metavar="SHAPE", help="find the block sizes of these models' products instead"
    )
    flags.add_json(command)


COMMANDS = {
    "ppl": "qrt_eval.ppl",
    "kld": "qrt_eval.kld",
    "lm": "qrt_eval.lm",
    "passkey": "qrt_eval.passkey",
    "kv-error": "qrt_eval.kv_error",
    "sweep": "qrt_eval.sweep",
    "latency": "qrt_eval.latency",
    "throughput": "qrt_eval.throughput",
    "serve": "qrt_eval.serve",
    "compare": "qrt_eval.compare",
    "kernels": "qrt_eval.kernels.run",
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of `qrt-eval`; returns the exit code."""
    arguments = parser().parse_args(argv)
    return run_main(lambda: import_module(COMMANDS[arguments.command]).run(arguments))


if __name__ == "__main__":
    sys.exit(main())
