"""Calibration data and the token windows cut from it; the default text needs no network."""

from __future__ import annotations

import ast
import logging
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from qrt.errors import CheckpointError, ConfigError
from qrt.gc import garbage_left
from qrt.model_files import hub
from qrt.text.data.files import find_files, is_known
from qrt.text.data.rows import DataRow, read_rows
from qrt.text.data.texts import Render, Texts
from qrt.text.tokenizer import Tokenizer
from qrt_calibrate.recipe.recipe import Recipe
from qrt_calibrate.text.windows import choose_windows

logger = logging.getLogger(__name__)

FORM = "ORG/NAME[@REVISION][:CONFIG[:SPLIT]]"
DATASET = re.compile(r"((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:@([^:]+))?(?::([^:]*))?(?::(.+))?", re.ASCII)
MOST_REASON = 300  # characters of an error of `datasets`, which lists configs and splits
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}


@dataclass(frozen=True)
class Calibration:
    """The windows of a job.

    windows    token ids int64 [B, T]: first the windows that calibrate, then those that evaluate
    metadata   facts about the text for the checkpoint's config
    rows       facts for the report about the rows of the text
    """

    windows: Tensor
    metadata: dict[str, Any]
    rows: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Calibration data.

    name             for messages and the report
    rows             a function that reads the rows from the first
    files_left_out   how many files of a folder are not read, by kind
    remote           whether the rows come over the network
    """

    name: str
    rows: Callable[[], Iterable[DataRow]]
    files_left_out: Mapping[str, int] = field(default_factory=dict)
    remote: bool = False


def calibration(recipe: Recipe, folder: Path) -> Calibration:
    """Cut the windows that a recipe asks for, with the tokenizer of the checkpoint in `folder`."""
    tokenizer = Tokenizer(folder)
    source = open_source(recipe.calib, recipe.seed)
    shape = {"n_samples": recipe.windows[0], "seqlen": recipe.seqlen, "seed": recipe.seed}
    found = choose_windows(
        source.rows, _render(tokenizer), tokenizer, sum(recipe.windows), recipe.seqlen, recipe.seed,
        source.remote,
    )  # fmt: skip
    _say_left_out(source, found.texts)
    rows = {
        "rows": found.rows, "rows_looked_at": found.sampled, "rows_left_out": found.texts.left_out,
        "files_left_out": dict(source.files_left_out),
    }  # fmt: skip
    return Calibration(
        found.ids, {"calibration": {"text": source.name, "sha256": found.sha256, **shape}}, rows
    )


def read_texts(calib: str | None, tokenizer: Tokenizer | None) -> tuple[list[str], str]:
    """Return all texts of some calibration data, and the data's name."""
    source = open_source(calib, seed=0)
    texts = Texts(_render(tokenizer))
    found = list(texts.documents(source.rows()))
    _say_left_out(source, texts)
    if not found:
        raise ConfigError(
            f"--calib: no row of {calib!r} can be used ({texts.reasons()}); give data that has text"
        )
    return found, source.name


def cut_windows(texts: Sequence[str], tokenizer: Tokenizer, count: int, seqlen: int, seed: int) -> Tensor:
    """Return token ids int64 [count, seqlen] of windows of the texts; see `choose_windows`."""
    rows = [DataRow(text, "the texts", number) for number, text in enumerate(texts, 1)]
    return choose_windows(lambda: rows, None, tokenizer, count, seqlen, seed).ids


def open_source(calib: str | None, seed: int) -> Source:
    """Return the data that --calib names; None names the docstrings of the standard library.

    A name is a file, a folder, or a dataset ("org/name", "org/name:config:split").
    """
    if calib is None:
        texts = partial(docstrings, Path(sysconfig.get_paths()["stdlib"]))
        return Source("python-docstrings", lambda: _numbered(texts(), "python-docstrings"))
    path = Path(calib).expanduser()
    if path.exists():
        found = find_files(path)
        return Source(
            found.name, lambda: (row for file in found.files for row in read_rows(file)), found.left_out
        )
    if is_known(path) or calib.startswith((".", "/", "~")):
        raise ConfigError(
            f"--calib: no file {calib!r}; give a data file or a folder of them, or leave the flag out"
        )
    return Source(calib, lambda: _numbered(_dataset(calib, seed), calib), remote=True)


def _numbered(values: Iterable[Any], name: str) -> Iterator[DataRow]:
    return (DataRow(value, name, number) for number, value in enumerate(values, 1))


def _say_left_out(source: Source, texts: Texts) -> None:
    for note in texts.notes(source.name, source.files_left_out):
        logger.warning("--calib: %s", note)


def _render(tokenizer: Tokenizer | None) -> Render | None:
    """Return the function that renders a conversation as the server does; None without a chat template."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return None
    return lambda messages, tools: tokenizer.render_chat(messages, tools=tools or None)


def _dataset(name: str, seed: int) -> Iterator[Any]:
    """Stream the rows of a dataset of the Hub or its cache, whose name matches DATASET.

    `seed` decides the order of its files.
    """
    import datasets

    found = DATASET.fullmatch(name)
    if found is None:
        raise ConfigError(f"--calib: expected a file, a folder or a dataset, {FORM}; got {name!r}")
    path, revision, config, split = (part or None for part in found.groups())
    try:
        with hub.dataset(str(path), revision):
            rows = datasets.load_dataset(
                path, config, split=split or "train", revision=revision, streaming=True
            )
            yield from rows.shuffle(seed=seed, buffer_size=1)
    except CheckpointError as error:
        raise ConfigError(f"--calib: {error}") from None
    except Exception as error:  # no network, no such dataset, another split: many kinds
        reason = " ".join(str(error).split())[:MOST_REASON]
        raise ConfigError(
            f"--calib: neither a file nor a dataset that can be read: {name!r} ({reason}); give a dataset as "
            f"{FORM}, a local file, or leave the flag out for the built-in text"
        ) from None


def docstrings(root: Path) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions under `root`, in the order of the paths.

    They are English about programming that every Python installation has. Tests are skipped, and so is
    `pydoc_data`, which evaluation reads.
    """
    paths = list[Path]()
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in SKIPPED_FOLDERS]  # which it then does not enter
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths):
        with garbage_left():  # which would visit the nodes over and over, half of the time
            found = [*_docstrings(ast.parse(path.read_bytes()))]
        yield from found


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if text := ast.get_docstring(node):
        yield text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child)
