"""Turn data rows into texts. A row is used whole, or left out and counted with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from qrt.errors import ConfigError, UnsupportedError
from qrt.text.data import chats
from qrt.text.data.chats import TEXT_KEYS, Message, Unused, is_conversation, kind_name
from qrt.text.data.files import decoding_fault
from qrt.text.data.json_rows import Broken
from qrt.text.data.rows import DataRow

MAX_REASONS = 50  # different reasons that are counted separately
MAX_LISTED = 6  # reasons that one message lists

Render = Callable[[Sequence[Message], Sequence[Any]], str]  # messages and tools to text


class Texts:
    """Turns rows into texts, and counts the rows that are left out.

    left_out   how many rows are left out, by reason, in the order in which the reasons first came
    used       how many rows are used
    """

    def __init__(self, render: Render | None) -> None:
        """Take the function that writes a conversation with the model's chat template.

        Without a template `render` is None: then rows of messages are left out, and a question and its
        answer are joined.
        """
        self._render = render
        self._examples: dict[str, str] = {}
        self.left_out: dict[str, int] = {}
        self.used = 0

    def of(self, rows: Iterable[DataRow]) -> Iterator[tuple[str, bool]]:
        """Yield the text of each row that is used, and whether the text ends with it."""
        for row in rows:
            try:
                text = text_of(row.value, self._render)
            except Unused as unused:
                reason = str(unused)
                if reason not in self.left_out and len(self.left_out) >= MAX_REASONS:
                    reason = "other reasons"
                self._examples.setdefault(reason, row.place)
                self.left_out[reason] = self.left_out.get(reason, 0) + 1
                continue
            self.used += 1
            yield text, row.ends

    def documents(self, rows: Iterable[DataRow]) -> Iterator[str]:
        """Yield the text of each row that is used; a text file gives one text."""
        parts = []
        for text, ends in self.of(rows):
            parts.append(text)
            if ends:
                yield "".join(parts)
                parts = []

    def notes(self, name: str, files: Mapping[str, int]) -> Iterator[str]:
        """Yield notes on what is left out of the data called `name`: `files` by kind, and rows by reason."""
        if files:
            kinds = ", ".join(f"{kind} ({count})" for kind, count in files.items())
            yield f"{name}: files left out: {kinds}"
        if left_out := sum(self.left_out.values()):
            rows = self.used + left_out
            yield f"{name}: {left_out:,} of the {rows:,} rows read are left out: {self.reasons()}"

    def reasons(self) -> str:
        """List the reasons, the most frequent first, each with its count and its first row."""
        most = sorted(self.left_out, key=lambda reason: -self.left_out[reason])
        named = [f"{self.left_out[r]:,}: {r} ({self._examples[r]})" for r in most[:MAX_LISTED]]
        more = sum(self.left_out[reason] for reason in most[MAX_LISTED:])
        return "; ".join([*named, *([f"{more:,}: other reasons"] if more else [])])


def text_of(value: Any, render: Render | None) -> str:
    """Return the text of a row; Unused, with the reason, where no text can be used whole.

    A string is the text itself. A list of messages is a conversation, which `render` writes. A dictionary
    holds a conversation (`messages_of`), or a text under one of TEXT_KEYS.
    """
    if isinstance(value, Broken):
        raise Unused(str(value))
    if isinstance(value, str):
        text = value
    elif is_conversation(value):
        text = _conversation(chats.conversation(value), [], render)
    elif isinstance(value, Mapping):
        text = _of_object(value, render)
    else:
        raise Unused(f"a row that is {kind_name(value)}, not an object or text")
    if not text.strip():
        raise Unused("an empty text")
    if fault := decoding_fault(text):
        raise Unused(fault)
    return text


def _of_object(row: Mapping[str, Any], render: Render | None) -> str:
    has_chat = any(row.get(key) is not None for key in chats.CHAT_KEYS)
    if not has_chat and isinstance(row.get("text"), str):
        return str(row["text"])
    messages = chats.messages_of(row)
    if messages is not None:
        if render is None and not has_chat and all(isinstance(m["content"], str) for m in messages):
            return _joined([str(m["content"]) for m in messages])
        return _conversation(messages, chats.tools_of(row), render)
    if (key := next((key for key in TEXT_KEYS if isinstance(row.get(key), str)), None)) is not None:
        return str(row[key])
    if any(key in row for key in chats.CHAT_KEYS):
        raise Unused("a conversation without messages")
    if (key := next((key for key in TEXT_KEYS if key in row), None)) is not None:
        raise Unused(f"{key!r} is {kind_name(row[key])}, not text")
    keys = ", ".join(map(str, row)) or "none"
    raise Unused(f"no key that holds a text or a conversation among its keys ({keys:.100})")


def _joined(parts: Sequence[str]) -> str:
    """Join texts, with a blank line between two that have no space there."""
    text = parts[0]
    for part in parts[1:]:
        text += part if text[-1:].isspace() or part[:1].isspace() else f"\n\n{part}"
    return text


def _conversation(messages: list[Message], tools: list[Any], render: Render | None) -> str:
    if render is None:
        raise Unused("chat messages, without a chat template to write them")
    try:
        text = render(messages, tools)
    except UnsupportedError:
        raise Unused("tools that the chat template does not show") from None
    except ConfigError as error:
        raise Unused(f"the chat template refuses it ({str(error).rpartition(': ')[2]:.80})") from None
    _check_shown(messages, tools, text)
    return text


def _check_shown(messages: Sequence[Message], tools: Sequence[Any], text: str) -> None:
    """Raise Unused where the rendered `text` lacks a tool or a part of the messages, in their order."""
    at = 0
    for message in messages:
        role = message["role"]
        anywhere = role in ("system", "developer")  # some templates put it into the last turn
        for part in _parts(message):
            found = _find(part, text, 0 if anywhere else at)
            if found is None:
                raise Unused(f"the chat template does not show a message of the role {role!r}")
            at = at if anywhere else found
    if any(_name(tool) not in text for tool in tools):
        raise Unused("tools that the chat template does not show")


def _parts(message: Message) -> list[str]:
    """Return what a rendering must show of a message: its texts and the names of the functions it calls.

    The reasoning before an answer is left out, because templates leave it out of earlier turns.
    """
    texts = list(_texts(message["content"]))
    if message["role"] == "assistant":
        texts = [text.rpartition("</think>")[2] for text in texts]
    return [*texts, *map(_name, message.get("tool_calls") or [])]


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a content: a string, its parts' texts, or the values of a function's result."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        values = [content["text"]] if content.get("type") == "text" else content.values()
        for value in values:
            yield from _texts(value)
    elif isinstance(content, list):
        for value in content:
            yield from _texts(value)


def _name(entry: Any) -> str:
    """Return the function name of a tool or a call; "" where it has none."""
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _find(part: str, text: str, start: int) -> int | None:
    """Return where `part` ends in `text`, plain or as JSON, without spaces around it; None if not found."""
    part = part.strip()
    forms = (part, *(json.dumps(part, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    for form in dict.fromkeys(forms):
        if (found := text.find(form, start)) >= 0:
            return found + len(form)
    return None
