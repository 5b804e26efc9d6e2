"""Define the flags that several commands of qrt-eval share, each of them once, and check their values.

A flag that takes several values takes them as words or with commas: `--kv int8 int4`, `--kv int8,int4`.
"""

from __future__ import annotations

import math
from argparse import Action, ArgumentTypeError, Namespace
from argparse import ArgumentParser as AnyParser
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from qrt.cli import ArgumentParser, add_flags
from qrt.config import DTYPES, EngineConfig
from qrt.model_files.location import EXPECTED
from qrt.quant.kv import KV_FORMATS, UNQUANTIZED_KV
from qrt.text.data.files import KINDS
from qrt_eval.inputs.prompts import INPUT_LEN, OUTPUT_LEN
from qrt_eval.inputs.shapes import SHAPES

KV_CHOICES = (*UNQUANTIZED_KV, *KV_FORMATS)
LENGTHS = "sharegpt, long, IN/OUT such as 1000/1000, or a FILE of prompts or of input_len and output_len"
PROTOCOLS = ("gptq", "llamacpp", "lmeval", "sliding")


def integer(least: int) -> Callable[[str], int]:
    """Return the type of a flag that takes an integer of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 1 << 63:
            raise ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
        return int(text)

    return read


positive = integer(1)


def number(what: str, good: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of a flag that takes a number that is `good`; `what` describes such numbers."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not good(value):
            raise ArgumentTypeError(f"expected a number {what}, got {text!r}")
        return value

    return read


above_0 = number("above 0", lambda value: 0 < value < math.inf)


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return the type of a flag that takes one of `choices`."""

    def read(text: str) -> str:
        if text not in choices:
            raise ArgumentTypeError(f"expected one of {', '.join(choices)}, got {text!r}")
        return text

    return read


def pair(least: int) -> Callable[[str], tuple[int, int]]:
    """Return the type of a flag that takes two sizes: `16x4096` -> (16, 4096); the second is >= `least`."""

    def read(text: str) -> tuple[int, int]:
        first, _, second = text.partition("x")
        try:
            return positive(first), integer(least)(second)
        except ArgumentTypeError:
            raise ArgumentTypeError(
                f"expected two numbers like 16x4096, at least 1x{least}, got {text!r}"
            ) from None

    return read


class _Flattened(Action):
    """Store the values of all words in one list."""

    def __call__(
        self, parser: AnyParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, list(chain.from_iterable(values)))


def add_several(command: Any, name: str, one: Callable[[str], Any], **kind: Any) -> None:
    """Add a flag that takes several values, each read by `one`."""

    def read(text: str) -> list[Any]:
        return [one(word) for word in text.split(",")]

    read.__name__ = one.__name__  # in argparse's messages
    command.add_argument(name, type=read, nargs="+", action=_Flattened, **kind)


def add_text(command: ArgumentParser, what: str, default: str | None, optional: bool) -> None:
    """Add the argument that names the text."""
    command.add_argument(
        "dataset",
        nargs="?" if optional else None,
        default=default,
        metavar="wikitext|pydoc|FILE|FOLDER",
        help=f"the text {what}; a file is {KINDS}; each row holds one document",
    )


def add_model(command: ArgumentParser, several: bool = False) -> None:
    """Add --model and the flags of the Hub."""
    several_of_them = "; takes several" if several else ""
    command.add_argument(
        "--model", required=True, nargs="+" if several else None, help=EXPECTED + several_of_them
    )
    add_flags(command, EngineConfig, "revision download_dir")


def add_model_or_shape(command: ArgumentParser) -> None:
    """Add --model for a checkpoint and --shape for random weights; one of them is required."""
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help=EXPECTED)
    add_shape(source)
    add_flags(command, EngineConfig, "revision download_dir")


def add_shape(command: Any, default: str | None = None) -> None:
    """Add --shape, a known model size that gets random weights."""
    command.add_argument(
        "--shape",
        default=default,
        choices=list(SHAPES),
        metavar="NAME",
        help=f"random weights with the sizes of {', '.join(SHAPES)}",
    )


def add_kv(command: ArgumentParser, name: str = "--kv", whose: str = "") -> None:
    """Add a flag that takes one KV format."""
    text = f"KV format{whose}: {', '.join(KV_CHOICES)}; auto and bf16 are unquantized"
    command.add_argument(name, type=one_of(KV_CHOICES), default="auto", metavar="FORMAT", help=text)


def add_kvs(command: ArgumentParser, default: Sequence[str], choices: Sequence[str] = KV_CHOICES) -> None:
    """Add --kv, which takes several KV formats."""
    text = f"KV formats: {', '.join(choices)}"
    add_several(command, "--kv", one_of(choices), default=list(default), metavar="FORMAT", help=text)


def add_count(
    command: ArgumentParser, name: str, metavar: str, text: str, default: int | None = None
) -> None:
    """Add a flag that takes one integer of at least 1."""
    command.add_argument(name, type=positive, default=default, metavar=metavar, help=text)


def add_dtype(command: ArgumentParser) -> None:
    """Add --dtype, the type of activations."""
    add_flags(command, EngineConfig, "dtype", choices=DTYPES, aliases=())


def add_batch(command: ArgumentParser, default: int, what: str = "requests") -> None:
    """Add --batch, the number of requests that run at once."""
    add_count(command, "--batch", "N", f"{what} that run at once", default)


def add_lengths(command: ArgumentParser, input_len: int, output_len: int) -> None:
    """Add --input-len and --output-len, the lengths of the requests that are timed."""
    add_count(command, "--input-len", "TOKENS", "tokens of each prompt", input_len)
    add_count(command, "--output-len", "TOKENS", "tokens to decode", output_len)


def add_requests(command: ArgumentParser) -> None:
    """Add the flags that describe requests when --lengths does not."""
    command.add_argument(
        "--prompts", metavar="FILE", help="one prompt per line, or .jsonl (default: random tokens)"
    )
    add_count(command, "--input-len", "TOKENS", f"tokens of each prompt (default: {INPUT_LEN})")
    text = f"tokens to decode, also for the prompts of --lengths FILE (default: {OUTPUT_LEN})"
    add_count(command, "--output-len", "TOKENS", text)


def add_limits(command: ArgumentParser) -> None:
    """Add the engine's limits, by vLLM's names alone."""
    sizes: dict[str, Any] = {"type": positive, "aliases": ()}
    text = "maximum number of requests that run at once (default: the largest --batch, or the engine's with "
    add_flags(command, EngineConfig, "max_num_seqs", **sizes, help=text + "--lengths)")
    add_flags(command, EngineConfig, "max_num_batched_tokens", **sizes)
    text = "maximum number of tokens of a request (default: those of the longest one)"
    add_flags(command, EngineConfig, "max_model_len", **sizes, help=text)
    share = number("above 0 and at most 1", lambda share: 0 < share <= 1)
    add_flags(command, EngineConfig, "gpu_memory_utilization", type=share, aliases=())
    add_flags(command, EngineConfig, "enforce_eager", aliases=())


def add_repeats(command: ArgumentParser, default: int | None = 3, text: str = "") -> None:
    """Add --repeats, the number of timed runs."""
    add_count(command, "--repeats", "N", f"runs, of which the median counts{text}", default)


def add_context(command: ArgumentParser, default: list[int] | None = None) -> None:
    """Add --context, the lengths that are tried one after the other."""
    text = "context lengths" + ("" if default else " (default: doubled from 512 up to the model's)")
    add_several(command, "--context", positive, default=default, metavar="TOKENS", help=text)


def add_limit(command: ArgumentParser, what: str, default: int | None = None) -> None:
    """Add --limit, which takes only the start of the data."""
    text = f"take only the first N {what}" + ("" if default else " (default: all)")
    command.add_argument("--limit", type=positive, default=default, metavar="N", help=text)


def add_seed(command: ArgumentParser, what: str) -> None:
    """Add --seed, for the random numbers that `what` names."""
    command.add_argument("--seed", type=integer(0), default=0, metavar="N", help=f"seed of {what}")


def add_json(command: ArgumentParser, resumes: bool = False) -> None:
    """Add --json, the result file."""
    text = "write the result to FILE" + ("; the same command resumes an interrupted run" if resumes else "")
    command.add_argument("--json", metavar="FILE", help=f"{text} (default: no file)")


def add_windows(command: ArgumentParser, seqlen: int | None = None, limit: int | None = None) -> None:
    """Add the flags that say where a text comes from, how it is cut, and in which dtype it is scored."""
    command.add_argument(
        "--protocol", default="gptq", choices=PROTOCOLS, help="how the text is cut and scored (default: gptq)"
    )
    text = "tokens of a window" + (
        "" if seqlen else " (default: the protocol's, limited to the models' context)"
    )
    add_count(command, "--seqlen", "TOKENS", text, seqlen)
    text = "new tokens per window with --protocol sliding (default: 512, at most --seqlen - 1)"
    add_count(command, "--stride", "TOKENS", text)
    add_limit(command, "windows (lmeval: documents)", limit)
    command.add_argument(
        "--data-file",
        metavar="FILE",
        help="a local wiki.test.raw (default: the one in QRT_DATA, or a download)",
    )
    add_dtype(command)
