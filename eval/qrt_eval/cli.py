"""Define the command line of `qrt-eval`. Each command's module is imported when the command runs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from qrt.cli import ArgumentParser, run_main
from qrt_eval.flags import quality, speed
from qrt_eval.inputs.preflight import preflight


class Command(NamedTuple):
    """Hold what a command does in a few words, who adds its flags, and the module whose `run` runs it."""

    help: str
    add_flags: Callable[[ArgumentParser], None]
    module: str


COMMANDS = {
    "ppl": Command("perplexity of a model, and of a baseline", quality.add_ppl, "qrt_eval.quality.ppl"),
    "kld": Command(
        "divergence of a model's predictions from a baseline's", quality.add_kld, "qrt_eval.quality.kld"
    ),
    "answers": Command(
        "answers to chats that differ from a baseline's", quality.add_answers, "qrt_eval.quality.answers"
    ),
    "lm": Command("tasks of lm-evaluation-harness", quality.add_lm, "qrt_eval.quality.lm"),
    "passkey": Command(
        "finding a key in a long context, per KV format", quality.add_passkey, "qrt_eval.quality.passkey"
    ),
    "kv-error": Command(
        "error of attention, per KV format and context length",
        quality.add_kv_error,
        "qrt_eval.quality.kv_error",
    ),
    "sweep": Command("all weight schemes and KV formats, with a report", speed.add_sweep, "qrt_eval.sweep"),
    "latency": Command("prefill and decode times of a batch", speed.add_latency, "qrt_eval.speed.latency"),
    "throughput": Command(
        "tokens per second of many requests, offline", speed.add_throughput, "qrt_eval.speed.throughput"
    ),
    "serve": Command("load on a running OpenAI-compatible server", speed.add_serve, "qrt_eval.speed.serve"),
    "grammar": Command(
        "time of grammars' masks, over JSON schemas", speed.add_grammar, "qrt_eval.speed.grammar"
    ),
    "compare": Command(
        "what changed between two result files", quality.add_compare, "qrt_eval.reports.compare"
    ),
    "models": Command("which architectures run, and how", quality.add_models, "qrt_eval.reports.models"),
    "kernels": Command(
        "time of every operator, beside its floor", speed.add_kernels, "qrt_eval.speed.kernels.run"
    ),
}


def parser() -> ArgumentParser:
    """Return the parser of the whole command line."""
    top = ArgumentParser(prog="qrt-eval", description="Measure what quantization costs, and what it buys.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_flags(commands.add_parser(name, help=command.help))
    return top


def main(argv: list[str] | None = None) -> int:
    """Run `qrt-eval`; return the exit code."""
    arguments = parser().parse_args(argv)
    return run_main(lambda: _run(arguments))


def _run(arguments: Namespace) -> None:
    preflight(arguments)
    import_module(COMMANDS[arguments.command].module).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
