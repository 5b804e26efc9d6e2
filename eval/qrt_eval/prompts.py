"""Prompts of a file: a text's lines, or the prompts of its rows."""

from __future__ import annotations

import logging
from pathlib import Path

from qrt.errors import ConfigError
from qrt.text.data.files import DataFile, decoding_fault, find_files
from qrt.text.data.json_rows import Broken
from qrt.text.data.rows import Row, read_lines, read_rows
from qrt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def read_prompts(flag: str, path: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return token ids of the prompts in a file: its lines, or the string or "prompt" of each row.

    `flag` is the command line's, for messages. A row without a prompt is left out with a warning; ConfigError
    where no prompt is left.
    """
    file = open_file(flag, path)
    if file.has_rows:
        found = {row.place: _prompt(row) for row in read_rows(file)}
    else:
        found = {f"line {number}": line for number, line in read_lines(file)}
    prompts = [prompt for prompt in found.values() if prompt is not None]
    without = [place for place, prompt in found.items() if prompt is None]
    if not prompts:
        raise ConfigError(
            f'{flag} {path}: holds no prompt; expected text, or rows with a "prompt" that is text'
        )
    if without:
        logger.warning(
            '%s %s: %d of %d rows have no "prompt" that is text (%s) and are left out',
            flag, path, len(without), len(found), without[0],
        )  # fmt: skip
    return [tokenizer.encode(prompt) for prompt in prompts]


def open_file(flag: str, path: str) -> DataFile:
    """Return the data file of a flag; ConfigError where there is none."""
    if not Path(path).is_file():
        raise ConfigError(f'{flag} {path}: no such file; give a text file or a .jsonl with "prompt" keys')
    (file,) = find_files(Path(path)).files
    return file


def _prompt(row: Row) -> str | None:
    """Return the row's text, or the "prompt" of an object; None where that is not text."""
    prompt = row.value.get("prompt") if isinstance(row.value, dict) else row.value
    is_text = isinstance(prompt, str) and not isinstance(prompt, Broken) and not decoding_fault(prompt)
    return prompt if is_text else None
