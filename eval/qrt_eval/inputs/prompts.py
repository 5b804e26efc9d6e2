"""Read prompts and conversations from a file: one per line of text, or one per row of data."""

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
    """Return the token ids of the prompts in a file: its lines, or the string or "prompt" of each row.

    `flag` is the command line's flag, for messages. A row without a prompt is skipped with a warning.
    ConfigError if no prompt is left.
    """
    return [tokenizer.encode(prompt) for prompt in _read(flag, path, _prompt, '"prompt" that is text')]


def read_conversations(flag: str, path: str) -> list[Conversation]:
    """Return the conversations in a file, each cut after the user's last message.

    A line, or a row that is a string or has a "prompt", is a user's first message. Other rows are
    conversations in any form that `chats` reads. Rows of other kinds are skipped with a warning. ConfigError
    if none is left.
    """
    return _read(flag, path, _conversation, "prompt or conversation that a user's message ends")


def _read(flag: str, path: str, take: Callable[[Any], T | None], what: str) -> list[T]:
    """Apply `take` to every line or row of a file and return what it finds; `what` names that in messages."""
    file = open_file(flag, path)
    if file.has_rows:
        found = {row.place: take(row.value) for row in read_rows(file)}
    else:
        found = {f"line {number}": take(line) for number, line in read_lines(file)}
    prompts = [prompt for prompt in found.values() if prompt is not None]
    without = [place for place, prompt in found.items() if prompt is None]
    if not prompts:
        raise ConfigError(f"{flag} {path}: expected text, or rows with a {what}, got no such row")
    if without:
        logger.warning(
            "%s %s: skipped %d of %d rows without a %s, the first is %s",
            flag, path, len(without), len(found), what, without[0],
        )  # fmt: skip
    return prompts


def open_file(flag: str, path: str) -> DataFile:
    """Return the data file that a flag names; ConfigError if there is none."""
    if not Path(path).is_file():
        raise ConfigError(f'{flag}: expected a text file or a .jsonl with "prompt" keys, got no file {path}')
    (file,) = find_files(Path(path)).files
    return file


def _prompt(value: Any) -> str | None:
    """Return the text of a row: the row itself, or its "prompt". None if that is not text."""
    prompt = value.get("prompt") if isinstance(value, dict) else value
    is_text = isinstance(prompt, str) and not isinstance(prompt, Broken) and not decoding_fault(prompt)
    return prompt if is_text else None


def _conversation(value: Any) -> Conversation | None:
    """Return the messages of a row up to the user's last one. A prompt counts as one such message."""
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
