"""Make the requests that `qrt-eval throughput` and `qrt-eval serve` send: their lengths and their tokens.

    sharegpt   1,000 requests like ShareGPT's: input and output lengths are lognormal with sigma 1.0 and mu
               4.8863 and 4.8537, clipped to 8..1,024; their means are then 207 and 201
    long       64 requests with 8,000 to 24,000 input tokens (uniform) and 256 output tokens
    IN/OUT     all requests have the same lengths, for example 1000/1000
    FILE       one row per request with its "input_len" and "output_len"; or prompts, one per line or row

The same seed gives the same lengths to every command and model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qrt.errors import ConfigError
from qrt.text.data.rows import DataRow, read_rows
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs.prompts import INPUT_LEN, OUTPUT_LEN, open_file, read_prompts

FIXED = re.compile(r"([1-9]\d{0,6})/([1-9]\d{0,6})")
WORDS = ("sharegpt", "long")
EXPECTED = f"{', '.join(WORDS)}, IN/OUT such as 1000/1000, or a file"
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LoadRequest:
    """Hold the token ids of a prompt, and how many tokens to decode."""

    ids: list[int]
    output_len: int


class Lengths(ABC):
    """Say which lengths the requests of a load have. `name` is the word on the command line."""

    name: str
    count: int | None = None  # the default number of requests

    @property
    @abstractmethod
    def longest(self) -> int:
        """Return the most tokens of a request, prompt and output together."""

    @abstractmethod
    def draw(self, count: int, random: np.random.Generator) -> Ints:
        """Return input and output lengths, int64 [count, 2]."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return `distribution` and its parameters, for the result file."""

    def requests(self, count: int, seed: int, vocab: int | Sequence[int]) -> list[LoadRequest]:
        """Return `count` requests of random tokens: ids below `vocab`, or from the ids that `vocab` lists."""
        random = np.random.default_rng(seed)
        pairs = self.draw(count, random)
        ids = random.choice(vocab, pairs[:, 0].sum())
        parts = np.split(ids, pairs[:-1, 0].cumsum())
        return [
            LoadRequest(part.tolist(), out) for part, out in zip(parts, pairs[:, 1].tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Fixed(Lengths):
    """Give all requests the same lengths."""

    input_len: int
    output_len: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.input_len}/{self.output_len}"

    @property
    def longest(self) -> int:
        return self.input_len + self.output_len

    def draw(self, count: int, random: np.random.Generator) -> Ints:
        return np.full((count, 2), (self.input_len, self.output_len), np.int64)

    def facts(self) -> dict[str, Any]:
        return {"distribution": "fixed", "input_len": self.input_len, "output_len": self.output_len}


class ShareGPT(Lengths):
    """Draw lognormal lengths, clipped. Their means, 207 in and 201 out, are those of ShareGPT."""

    name, count = "sharegpt", 1000
    SIGMA, INPUT_MU, OUTPUT_MU = 1.0, 4.8863, 4.8537
    SHORTEST, LONGEST = 8, 1024

    @property
    def longest(self) -> int:
        return 2 * self.LONGEST

    def draw(self, count: int, random: np.random.Generator) -> Ints:
        drawn = random.lognormal((self.INPUT_MU, self.OUTPUT_MU), self.SIGMA, (count, 2))
        return drawn.round().clip(self.SHORTEST, self.LONGEST).astype(np.int64)

    def facts(self) -> dict[str, Any]:
        return {
            "distribution": "lognormal", "sigma": self.SIGMA, "input_mu": self.INPUT_MU,
            "output_mu": self.OUTPUT_MU, "shortest": self.SHORTEST, "longest": self.LONGEST,
        }  # fmt: skip


class Long(Lengths):
    """Draw long prompts of uniform lengths, with short answers."""

    name, count = "long", 64
    SHORTEST, LONGEST, OUTPUT = 8000, 24000, 256

    @property
    def longest(self) -> int:
        return self.LONGEST + self.OUTPUT

    def draw(self, count: int, random: np.random.Generator) -> Ints:
        inputs = random.integers(self.SHORTEST, self.LONGEST, count, endpoint=True)
        return np.stack((inputs, np.full(count, self.OUTPUT)), 1)

    def facts(self) -> dict[str, Any]:
        inputs = {"shortest_input": self.SHORTEST, "longest_input": self.LONGEST}
        return {"distribution": "uniform", **inputs, "output_len": self.OUTPUT}


class Listed(Lengths):
    """Take the lengths from the rows of a file, in order. After the last row the first one follows again."""

    def __init__(self, name: str, pairs: Sequence[tuple[int, int]]) -> None:
        self.name, self.count = name, len(pairs)
        self._pairs = np.array(pairs, np.int64)

    @property
    def longest(self) -> int:
        return int(self._pairs.sum(1).max())

    def draw(self, count: int, random: np.random.Generator) -> Ints:
        return np.resize(self._pairs, (count, 2))

    def facts(self) -> dict[str, Any]:
        return {"distribution": "listed", "rows": len(self._pairs)}


class GivenPrompts(Lengths):
    """Take given prompts in order, and repeat them as needed. All have the same output length."""

    def __init__(self, name: str, prompts: Sequence[list[int]], output_len: int) -> None:
        self.name, self.count = name, len(prompts)
        self._prompts, self._output_len = prompts, output_len

    @property
    def longest(self) -> int:
        return max(map(len, self._prompts)) + self._output_len

    def draw(self, count: int, random: np.random.Generator) -> Ints:
        return np.array([(len(ids), self._output_len) for ids in islice(cycle(self._prompts), count)])

    def facts(self) -> dict[str, Any]:
        return {"distribution": "prompts", "rows": len(self._prompts), "output_len": self._output_len}

    def requests(self, count: int, seed: int, vocab: int | Sequence[int]) -> list[LoadRequest]:
        return [LoadRequest(ids, self._output_len) for ids in islice(cycle(self._prompts), count)]


def parse(word: str) -> Lengths | None:
    """Return the lengths that `--lengths WORD` names, or None when WORD is a file of prompts.

    ConfigError if WORD is none of `EXPECTED`, or if the first row of a file has lengths and a later one has
    not.
    """
    if word in WORDS:
        return ShareGPT() if word == "sharegpt" else Long()
    if match := FIXED.fullmatch(word):
        return Fixed(int(match[1]), int(match[2]))
    if not Path(word).is_file():
        raise ConfigError(f"--lengths: expected {EXPECTED}, got {word!r}")
    file = open_file("--lengths", word)
    rows = iter(read_rows(file)) if file.has_rows else iter(())
    first = next(rows, None)
    if first is None or not isinstance(first.value, dict) or "input_len" not in first.value:
        return None
    return Listed(word, [_pair(first), *map(_pair, rows)])


def sources(arguments: Namespace, words: Sequence[str], tokenizer: Callable[[], Tokenizer]) -> list[Lengths]:
    """Return where the requests come from: one source per word of --lengths, or one for the other flags.

    Sets --input-len and --output-len to their defaults. ConfigError if flags exclude each other.
    """
    if words:
        refuse_beside_lengths(arguments, "prompts", "input_len")
        size = arguments.output_len or OUTPUT_LEN
        found = [parse(word) or _texts("--lengths", word, tokenizer(), size) for word in words]
        if arguments.output_len and not any(isinstance(lengths, GivenPrompts) for lengths in found):
            raise ConfigError(
                "--output-len: expected a file of prompts in --lengths, got none; leave the flag out"
            )
        return found
    arguments.input_len = arguments.input_len or INPUT_LEN
    arguments.output_len = arguments.output_len or OUTPUT_LEN
    if arguments.prompts:
        return [_texts("--prompts", arguments.prompts, tokenizer(), arguments.output_len)]
    return [Fixed(arguments.input_len, arguments.output_len)]


def facts_of(lengths: Lengths, pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return what a result file says about the lengths, with the means of those that were drawn."""
    inputs, outputs = np.mean(pairs, 0).tolist()
    return {"name": lengths.name, **lengths.facts(), "mean_input_len": inputs, "mean_output_len": outputs}


def refuse_beside_lengths(arguments: Namespace, *names: str) -> None:
    """Raise ConfigError if one of the flags `names` is given beside --lengths, which decides the same."""
    for name in names:
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: expected --lengths or {flag}, got both; leave one out")


def _texts(flag: str, path: str, tokenizer: Tokenizer, output_len: int) -> GivenPrompts:
    return GivenPrompts(path, read_prompts(flag, path, tokenizer), output_len)


def _pair(row: DataRow) -> tuple[int, int]:
    """Return the input and output length of a row."""
    found = []
    for key in ("input_len", "output_len"):
        value = row.value.get(key) if isinstance(row.value, dict) else None
        if isinstance(value, str) and value.isdecimal():  # CSV holds text only
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"--lengths: {row.place}: expected {key} of at least 1, got {value!r}; correct the row, or "
                'leave "input_len" out of all rows and give prompts'
            )
        found.append(value)
    return found[0], found[1]
