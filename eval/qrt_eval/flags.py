"""Flags that commands of qrt-eval share, each defined once; and what their values must be.

A flag that takes several values takes them as words or with commas: `--kv int8 int4`, `--kv int8,int4`.
"""

from __future__ import annotations

import math
from argparse import Action, ArgumentTypeError, Namespace
from argparse import ArgumentParser as AnyParser
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from qrt.cli import ArgumentParser, add_hub_flags
from qrt.config import DTYPES
from qrt.location import EXPECTED
from qrt.quant.kv import KV_FORMATS, UNQUANTIZED_KV
from qrt.text.data.files import KINDS
from qrt_eval.inputs.prompts import INPUT_LEN, OUTPUT_LEN
from qrt_eval.inputs.shapes import SHAPES

KV_CHOICES = (*UNQUANTIZED_KV, *KV_FORMATS)
LENGTHS = "sharegpt, long, IN/OUT such as 1000/1000, or FILE (rows of input_len and output_len, or prompts)"
PROTOCOLS = ("gptq", "llamacpp", "lmeval", "sliding")


def integer(least: int) -> Callable[[str], int]:
    """The type of a flag that wants an integer of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 1 << 63:
            raise ArgumentTypeError(f"got {text!r}, wanted an integer of at least {least}")
        return int(text)

    return read


positive = integer(1)


def number(what: str, good: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of a flag that wants a number that is `good`; `what` says which those are."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not good(value):
            raise ArgumentTypeError(f"got {text!r}, wanted a number {what}")
        return value

    return read


above_0 = number("above 0", lambda value: 0 < value < math.inf)


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """The type of a flag that wants one of `choices`."""

    def read(text: str) -> str:
        if text not in choices:
            raise ArgumentTypeError(f"got {text!r}, wanted one of {', '.join(choices)}")
        return text

    return read


def pair(least: int) -> Callable[[str], tuple[int, int]]:
    """The type of a flag that wants two sizes: `16x4096` -> (16, 4096), the second at least `least`."""

    def read(text: str) -> tuple[int, int]:
        first, _, second = text.partition("x")
        try:
            return positive(first), integer(least)(second)
        except ArgumentTypeError:
            raise ArgumentTypeError(
                f"got {text!r}, wanted two numbers like 16x4096, at least 1x{least}"
            ) from None

    return read


class _Flattened(Action):
    """The values of all words."""

    def __call__(
        self, parser: AnyParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, list(chain.from_iterable(values)))


def add_several(command: ArgumentParser, name: str, one: Callable[[str], Any], **kind: Any) -> None:
    """A flag of several values, each read by `one`."""

    def read(text: str) -> list[Any]:
        return [one(word) for word in text.split(",")]

    read.__name__ = one.__name__  # in argparse's messages
    command.add_argument(name, type=read, nargs="+", action=_Flattened, **kind)


def add_text(command: ArgumentParser, what: str, default: str | None, optional: bool) -> None:
    """The text."""
    command.add_argument(
        "dataset",
        nargs="?" if optional else None,
        default=default,
        metavar="wikitext|pydoc|FILE|FOLDER",
        help=f"the text {what}; a file is {KINDS}; the text of a row is a document",
    )


def add_model(command: ArgumentParser, several: bool = False) -> None:
    """Checkpoints."""
    several_of_them = "; or several" if several else ""
    command.add_argument(
        "--model", required=True, nargs="+" if several else None, help=EXPECTED + several_of_them
    )
    add_hub_flags(command)


def add_model_or_shape(command: ArgumentParser) -> None:
    """A checkpoint, or random weights of a known shape."""
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help=EXPECTED)
    add_shape(source)
    add_hub_flags(command)


def add_shape(command: Any, default: str | None = None) -> None:
    """Random weights of a known shape."""
    command.add_argument(
        "--shape", default=default, choices=list(SHAPES), metavar="NAME", help=f"sizes of {', '.join(SHAPES)}"
    )


def add_kv(command: ArgumentParser, name: str = "--kv", whose: str = "") -> None:
    """One KV format."""
    text = f"KV format{whose}, of {', '.join(KV_CHOICES)}; auto and bf16 are unquantized"
    command.add_argument(name, type=one_of(KV_CHOICES), default="auto", metavar="FORMAT", help=text)


def add_kvs(command: ArgumentParser, default: Sequence[str], choices: Sequence[str] = KV_CHOICES) -> None:
    """Several KV formats."""
    text = f"KV formats, of {', '.join(choices)}"
    add_several(command, "--kv", one_of(choices), default=list(default), metavar="FORMAT", help=text)


def add_dtype(command: ArgumentParser) -> None:
    """Of activations."""
    command.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="of activations; auto is the checkpoint's on a GPU, float32 on a CPU",
    )


def add_batch(command: ArgumentParser, default: int | list[int], what: str = "requests") -> None:
    """How many at once; several batch sizes are measured one after the other."""
    kind: dict[str, Any] = {"default": default, "metavar": "N", "help": f"{what} at once"}
    if isinstance(default, list):
        add_several(command, "--batch", positive, **kind)
    else:
        command.add_argument("--batch", type=positive, **kind)


def add_lengths(command: ArgumentParser, input_len: int, output_len: int) -> None:
    """Of requests whose speed is taken."""
    for name, default, what in (("input", input_len, "of each prompt"), ("output", output_len, "to decode")):
        command.add_argument(
            f"--{name}-len", type=positive, default=default, metavar="TOKENS", help=f"tokens {what}"
        )


def add_num_prompts(command: ArgumentParser, text: str) -> None:
    """How many requests."""
    command.add_argument("--num-prompts", type=positive, metavar="N", help=text)


def add_requests(command: ArgumentParser) -> None:
    """Add what requests are like where --lengths does not say it."""
    command.add_argument(
        "--prompts", metavar="FILE", help="a prompt a line, or .jsonl (default: random tokens)"
    )
    command.add_argument(
        "--input-len", type=positive, metavar="TOKENS", help=f"tokens of each prompt (default: {INPUT_LEN})"
    )
    text = f"tokens to decode, also for prompts of --lengths FILE (default: {OUTPUT_LEN})"
    command.add_argument("--output-len", type=positive, metavar="TOKENS", help=text)


def add_limits(command: ArgumentParser) -> None:
    """Add the engine's limits, in the names of qrt-serve."""
    command.add_argument(
        "--max-num-seqs",
        type=positive,
        metavar="N",
        help="most requests that run at once (default: the largest --batch; the engine's with --lengths)",
    )
    command.add_argument(
        "--max-num-batched-tokens", type=positive, default=8192, metavar="N", help="most tokens of a step"
    )
    command.add_argument(
        "--max-model-len",
        type=positive,
        metavar="TOKENS",
        help="most tokens of a request (default: the longest one's)",
    )
    command.add_argument(
        "--gpu-memory-utilization",
        type=number("above 0 and at most 1", lambda share: 0 < share <= 1),
        metavar="SHARE",
        help="share of the GPU's memory to use (default: 0.9)",
    )
    command.add_argument("--enforce-eager", action="store_true", help="record no CUDA graphs")


def add_repeats(command: ArgumentParser, default: int | None = 3, text: str = "") -> None:
    """Of a timing."""
    command.add_argument(
        "--repeats", type=positive, default=default, metavar="N", help=f"runs; the median counts{text}"
    )


def add_context(command: ArgumentParser, default: list[int] | None = None) -> None:
    """Lengths that are tried one after the other."""
    text = "lengths" if default else "lengths (default: doubling from 512 to the model's)"
    add_several(command, "--context", positive, default=default, metavar="TOKENS", help=text)


def add_limit(command: ArgumentParser, what: str, default: int | None = None) -> None:
    """The start of the data alone."""
    text = f"the first N {what} only" + ("" if default else " (default: all)")
    command.add_argument("--limit", type=positive, default=default, metavar="N", help=text)


def add_seed(command: ArgumentParser, what: str) -> None:
    """Of what is drawn."""
    command.add_argument("--seed", type=integer(0), default=0, metavar="N", help=f"of {what}")


def add_json(command: ArgumentParser, resumes: bool = False) -> None:
    """The result file."""
    text = "write the result there" + ("; the same command takes up an interrupted run" if resumes else "")
    command.add_argument("--json", metavar="FILE", help=f"{text} (default: no file)")


def add_windows(command: ArgumentParser, seqlen: int | None = None, limit: int | None = None) -> None:
    """How a text is cut, where it comes from, and what runs over it."""
    command.add_argument(
        "--protocol", default="gptq", choices=PROTOCOLS, help="how windows are cut and scored (default: gptq)"
    )
    text = "tokens of a window" + (
        "" if seqlen else " (default: the protocol's, at most the models' context)"
    )
    command.add_argument("--seqlen", type=positive, default=seqlen, metavar="TOKENS", help=text)
    command.add_argument(
        "--stride",
        type=positive,
        metavar="TOKENS",
        help="new tokens of a window of --protocol sliding (default: 512, at most --seqlen - 1)",
    )
    add_limit(command, "windows (lmeval: documents)", limit)
    command.add_argument(
        "--data-file", metavar="FILE", help="a local wiki.test.raw (default: QRT_DATA's, or the download)"
    )
    add_dtype(command)
