"""Prompts and conversations of a file: a text's lines, or what its rows hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from qrt.errors import ConfigError
from qrt.text.data.chats import Message, Unused, conversation, is_conversation, messages_of
from qrt.text.data.files import DataFile, decoding_fault, find_files
from qrt.text.data.json_rows import Broken
from qrt.text.data.rows import read_lines, read_rows
from qrt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
Conversation = list[Message]
CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")  # 20 of qrt's own
INPUT_LEN, OUTPUT_LEN = 1024, 128  # tokens of a request, unless given


def read_prompts(flag: str, path: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return token ids of the prompts in a file: its lines, or the string or "prompt" of each row.

    `flag` is the command line's, for messages. A row without a prompt is left out with a warning; ConfigError
    where no prompt is left.
    """
    return [tokenizer.encode(prompt) for prompt in _read(flag, path, _prompt, '"prompt" that is text')]


def read_conversations(flag: str, path: str) -> list[Conversation]:
    """Return the conversations in a file, each up to the user's last message.

    A line, or the string or "prompt" of a row, is a user's first message; other rows are conversations in any
    form that `chats` reads. A row without either is left out with a warning; ConfigError where none is left.
    """
    return _read(flag, path, _conversation, "prompt or conversation that a user's message ends")


def _read(flag: str, path: str, take: Callable[[Any], T | None], what: str) -> list[T]:
    """Return what `take` finds in the lines or rows of a file; None means that there is no `what` in it."""
    file = open_file(flag, path)
    if file.has_rows:
        found = {row.place: take(row.value) for row in read_rows(file)}
    else:
        found = {f"line {number}": take(line) for number, line in read_lines(file)}
    prompts = [prompt for prompt in found.values() if prompt is not None]
    without = [place for place, prompt in found.items() if prompt is None]
    if not prompts:
        raise ConfigError(f"{flag} {path}: holds no prompt; expected text, or rows with a {what}")
    if without:
        logger.warning(
            "%s %s: %d of %d rows have no %s (%s) and are left out",
            flag, path, len(without), len(found), what, without[0],
        )  # fmt: skip
    return prompts


def open_file(flag: str, path: str) -> DataFile:
    """Return the data file of a flag; ConfigError where there is none."""
    if not Path(path).is_file():
        raise ConfigError(f'{flag} {path}: no such file; give a text file or a .jsonl with "prompt" keys')
    (file,) = find_files(Path(path)).files
    return file


def _prompt(value: Any) -> str | None:
    """Return a row that is text, or the "prompt" of an object; None where that is not text."""
    prompt = value.get("prompt") if isinstance(value, dict) else value
    is_text = isinstance(prompt, str) and not isinstance(prompt, Broken) and not decoding_fault(prompt)
    return prompt if is_text else None


def _conversation(value: Any) -> Conversation | None:
    """Return the messages of a row up to the user's last one, or a prompt as such a message."""
    try:
        messages = conversation(value) if is_conversation(value) else None
        if messages is None and isinstance(value, Mapping):
            messages = messages_of(value)
    except Unused:
        return None
    if messages is None:
        prompt = _prompt(value)
        return None if prompt is None else [{"role": "user", "content": prompt}]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages or None
