"""Items of a conversation in /v1/responses, and the messages of a chat that they become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from qrt.errors import ConfigError, UnsupportedError
from qrt.serve.http.body import Body
from qrt.serve.settings import MAX_MESSAGES

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
REASONING = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
ROLES = ("user", "assistant", "system", "developer")


class ItemPart(Body):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[ItemPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class Item(Body):
    """An item of any type, with the fields of those that qrt reads."""

    type: str | None = None
    role: str | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat.

    What an assistant has thought, said and called in one turn is one message, as chat templates expect.
    ConfigError for an item that lacks something, UnsupportedError for a type that qrt does not read.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where, kind = f"input.{index}", item.type or "message"
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            if text := _text(item.content, REASONING, f"{where}.content") or _text(
                item.summary, REASONING, f"{where}.summary"
            ):
                _turn(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text
        elif kind == "function_call":
            function = {"name": _needed(item, "name", where), "arguments": _needed(item, "arguments", where)}
            call = {"id": _needed(item, "call_id", where), "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            answer = _text(_needed(item, "output", where), TEXTS, f"{where}.output")
            id = _needed(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": id, "content": answer})
        elif kind == "item_reference":
            raise UnsupportedError(
                f"{where}: responses are not stored, so none can be referred to; send the item itself"
            )
        else:
            raise UnsupportedError(
                f"{where}.type: expected message, reasoning, function_call or function_call_output, "
                f"got {kind!r:.50}"
            )
    return messages


def _add_message(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    role = _needed(item, "role", where)
    if role not in ROLES:
        raise ConfigError(f"{where}.role: expected {', '.join(ROLES[:-1])} or {ROLES[-1]}, got {role!r:.50}")
    content = _content(_needed(item, "content", where), f"{where}.content")
    if role == "assistant":
        _turn(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _turn(messages: list[dict[str, Any]], *begun: str) -> dict[str, Any]:
    """Return the assistant's message to add to: the last one, unless it has one of the keys in `begun`."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(key) is not None for key in begun):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _needed(item: Item, name: str, where: str) -> Any:
    if (value := getattr(item, name)) is None:
        raise ConfigError(f"{where}.{name}: expected a value, got none")
    return value


def _content(content: str | Parts, where: str) -> str | list[dict[str, Any]]:
    """Return a text, or several as the parts of a chat's message."""
    if isinstance(content, str):
        return content
    texts = _texts(content, TEXTS, where)
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _text(content: str | Parts | None, kinds: dict[str, str], where: str) -> str:
    return content if isinstance(content, str) else "\n".join(_texts(content or [], kinds, where))


def _texts(parts: Parts, kinds: dict[str, str], where: str) -> list[str]:
    texts = []
    for index, part in enumerate(parts):
        if part.type not in kinds:
            raise UnsupportedError(
                f"{where}.{index}.type: expected a type that holds text, got {part.type!r:.50}; "
                "qrt reads text only"
            )
        text: str | None = getattr(part, kinds[part.type])
        if text is None:
            raise ConfigError(f"{where}.{index}.{kinds[part.type]}: expected a text, got none")
        texts.append(text)
    return texts
