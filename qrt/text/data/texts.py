"""The text of a data row, used whole; or the reason why the row is left out, which is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from qrt.errors import ConfigError, UnsupportedError
from qrt.text.data import chats
from qrt.text.data.chats import Message, Unused, is_conversation, kind_name
from qrt.text.data.files import decoding_fault
from qrt.text.data.json_rows import Broken
from qrt.text.data.rows import Row

TEXT_KEYS = ("text", "content", "prompt")  # what a row without a conversation has its text under
REASONS = 50  # that are told apart
MOST_REASONS = 6  # that a message lists

Render = Callable[[Sequence[Message], Sequence[Any]], str]  # messages and tools to text


class Texts:
    """Takes the texts of rows, and counts the rows that are left out.

    left_out   how many rows are not used, by reason, the reasons in the order they came
    used       how many are
    """

    def __init__(self, render: Render | None) -> None:
        """`render` writes a conversation by the model's chat template; None where there is none: then
        messages are left out, and a question with its answer is joined."""
        self._render = render
        self._examples: dict[str, str] = {}
        self.left_out: dict[str, int] = {}
        self.used = 0

    def of(self, rows: Iterable[Row]) -> Iterator[tuple[str, bool]]:
        """The text of each row that is used, and whether it ends there."""
        for row in rows:
            try:
                text = text_of(row.value, self._render)
            except Unused as unused:
                reason = str(unused)
                if reason not in self.left_out and len(self.left_out) >= REASONS:
                    reason = "other reasons"
                self._examples.setdefault(reason, row.place)
                self.left_out[reason] = self.left_out.get(reason, 0) + 1
                continue
            self.used += 1
            yield text, row.ends

    def documents(self, rows: Iterable[Row]) -> Iterator[str]:
        """The text of each row that is used, that of a text file whole."""
        parts = []
        for text, ends in self.of(rows):
            parts.append(text)
            if ends:
                yield "".join(parts)
                parts = []

    def notes(self, name: str, files: Mapping[str, int]) -> Iterator[str]:
        """Sentences about what of the data called `name` is not used: of its rows, and of `files` by kind."""
        if files:
            kinds = ", ".join(f"{kind} ({count})" for kind, count in files.items())
            yield f"{name}: files that are left out: {kinds}"
        if left_out := sum(self.left_out.values()):
            rows = self.used + left_out
            yield f"{name}: {left_out:,} of the {rows:,} rows looked at are left out: {self.reasons()}"

    def reasons(self) -> str:
        """The reasons, the most frequent first, each with its count and the first row."""
        most = sorted(self.left_out, key=lambda reason: -self.left_out[reason])
        named = [f"{self.left_out[r]:,}: {r} ({self._examples[r]})" for r in most[:MOST_REASONS]]
        more = sum(self.left_out[reason] for reason in most[MOST_REASONS:])
        return "; ".join([*named, *([f"{more:,}: other reasons"] if more else [])])


def text_of(value: Any, render: Render | None) -> str:
    """The text of a row; raises Unused with the reason where it has none that can be used whole.

    A string is its own text. Of a dictionary it is a conversation as `render` writes it (`messages_of`), or
    what stands under `text`, `content` or `prompt`. A list of messages is a conversation, too.
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
    """Texts one behind the other, a blank line between those that bring no space."""
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
    """Unused where the rendered `text` lacks a part of the messages, in their order, or one of the tools."""
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
    """What must be seen of a message: its texts, without the reasoning before an answer, which templates
    leave out of earlier turns, and the names of the functions it calls."""
    texts = list(_texts(message["content"]))
    if message["role"] == "assistant":
        texts = [text.rpartition("</think>")[2] for text in texts]
    return [*texts, *map(_name, message.get("tool_calls") or [])]


def _texts(content: Any) -> Iterator[str]:
    """The texts of a content: itself, those of its parts, or the values of a function's result."""
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
    """The function's name of a tool or a call, "" where it has none."""
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _find(part: str, text: str, start: int) -> int | None:
    """Where `part` ends in `text`, as it is or as JSON, spaces around it aside; None where it does not."""
    part = part.strip()
    forms = (part, *(json.dumps(part, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    for form in dict.fromkeys(forms):
        if (found := text.find(form, start)) >= 0:
            return found + len(form)
    return None
