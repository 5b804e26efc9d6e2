"""Messages and blocks of Anthropic's API, and the messages of a chat that they become."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Field

from qrt.errors import ConfigError, UnsupportedError
from qrt.serve.http.body import Body
from qrt.serve.settings import MAX_MESSAGES

ROLES = {"user": "user", "assistant": "assistant", "system": "system"}
ROLES |= {"ctx": "user", "msg": "user"}  # by which some versions of Claude Code add what they tell the model
BILLING = "x-anthropic-billing-header"  # begins a block that Claude Code adds for Anthropic's servers alone


class TextBlock(Body):
    """A block where only text may be: in `system` and in the result of a tool."""

    type: str
    text: str | None = None


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ContentBlock(Body):
    """A block of any type, with the fields of those that qrt reads."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | TextBlocks | None = None


class InputMessage(Body):
    """One message."""

    role: str
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def messages_of(system: str | TextBlocks | None, messages: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """Return the messages of a chat.

    ConfigError for a block that lacks something, UnsupportedError for a type that qrt does not read.
    """
    found: list[dict[str, Any]] = []
    if system:
        texts = [system] if isinstance(system, str) else list(_texts(system, "system"))
        found += _message("system", [text for text in texts if not text.startswith(BILLING)])
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if message.role not in ROLES:
            raise ConfigError(f"{where}.role: expected user, assistant or system, got {message.role!r:.50}")
        role = ROLES[message.role]
        if isinstance(message.content, str):
            found.append({"role": role, "content": message.content})
        elif role == "assistant":
            found.append(_assistant(message.content, f"{where}.content"))
        else:
            found += _others(role, message.content, f"{where}.content")
    return found


def _assistant(blocks: Sequence[ContentBlock], where: str) -> dict[str, Any]:
    """Return what an assistant has thought, said and called."""
    thoughts, texts, calls = [], [], []
    for index, block in enumerate(blocks):
        place = f"{where}.{index}"
        if block.type == "thinking":
            thoughts.append(_needed(block, "thinking", place))
        elif block.type == "text":
            texts.append(_needed(block, "text", place))
        elif block.type == "tool_use":
            function = {"name": _needed(block, "name", place), "arguments": _needed(block, "input", place)}
            calls.append({"id": _needed(block, "id", place), "type": "function", "function": function})
        elif block.type != "redacted_thinking":  # which only Anthropic's servers can read
            raise _unread(block.type, place)
    message: dict[str, Any] = {"role": "assistant", "content": _content(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _others(role: str, blocks: Sequence[ContentBlock], where: str) -> Iterable[dict[str, Any]]:
    """Return a message of a user or of the system, and before it one for each result of a tool."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}.{index}"
        if block.type == "text":
            texts.append(_needed(block, "text", place))
        elif block.type == "tool_result" and role == "user":
            content = block.content or ""
            if not isinstance(content, str):
                content = "\n".join(_texts(content, f"{place}.content"))
            id = _needed(block, "tool_use_id", place)
            results.append({"role": "tool", "tool_call_id": id, "content": content})
        else:
            raise _unread(block.type, place)
    return [*results, *_message(role, texts)]


def _message(role: str, texts: list[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": _content(texts)}] if texts else []


def _content(texts: list[str]) -> str | list[dict[str, Any]] | None:
    """Return a text, or several as the parts of a chat's message."""
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else None


def _texts(blocks: TextBlocks, where: str) -> Iterable[str]:
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise _unread(block.type, f"{where}.{index}")
        yield _needed(block, "text", f"{where}.{index}")


def _needed(block: Body, name: str, where: str) -> Any:
    if (value := getattr(block, name)) is None:
        raise ConfigError(f"{where}.{name}: expected a value, got none")
    return value


def _unread(kind: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}.type: expected a type that holds text, got {kind!r:.50}; qrt reads text only"
    )
