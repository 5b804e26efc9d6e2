"""`qrt-eval`: the command line of the evaluators; each command's module is imported when it runs."""

from __future__ import annotations

from importlib import import_module

from qrt.cli import ArgumentParser, run_main
from qrt_eval import flags

OPS = ("linear", "decode", "prefill", "kv_write", "elementwise", "sample")


def parser() -> ArgumentParser:
    """The whole command line."""
    top = ArgumentParser(prog="qrt-eval", description="What quantization cost, and what it bought.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    flags.add_ppl(commands.add_parser("ppl", help="perplexity of a model, beside a baseline"))
    flags.add_kld(commands.add_parser("kld", help="divergence of a model's distributions from a baseline's"))
    _add_latency(commands.add_parser("latency", help="prefill and decode times of a batch"))
    _add_kernels(commands.add_parser("kernels", help="every operator beside its floor"))
    return top


def _add_latency(command: ArgumentParser) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="checkpoint folder, or 'tiny'")
    source.add_argument("--shape", help="random weights of a known shape, e.g. llama-3-8b")
    command.add_argument("--weights", default="w4a16", help="weight scheme of --shape (default: w4a16)")
    flags.add_kv(command)
    command.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B", help="requests at once")
    command.add_argument("--input-len", type=int, default=1024, metavar="TOKENS", help="prompt length")
    command.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="tokens to decode")
    command.add_argument(
        "--compare", action="store_true", help="time transformers in bf16 too, in the same run; with --shape"
    )
    command.add_argument("--json", metavar="FILE", help="write the result there")


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
    command.add_argument("--json", metavar="FILE", help="write the result there")


COMMANDS = {
    "ppl": "qrt_eval.ppl",
    "kld": "qrt_eval.kld",
    "latency": "qrt_eval.latency",
    "kernels": "qrt_eval.kernels.run",
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of `qrt-eval`; returns the exit code."""
    arguments = parser().parse_args(argv)
    return run_main(lambda: import_module(COMMANDS[arguments.command]).run(arguments))
