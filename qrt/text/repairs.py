"""Repairs: each brings messages that a chat template refuses into a form that more templates accept."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any


def without_null(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give a message without content an empty one."""
    return [{**m, "content": ""} if m.get("content") is None else m for m in messages]


def _with_mappings(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Wrap arguments that are not a mapping into one: {"arguments": ...}."""
    return _with_functions(
        messages,
        lambda function: (
            function
            if isinstance(function.get("arguments"), Mapping)
            else {**function, "arguments": {"arguments": function.get("arguments")}}
        ),
    )


def _with_functions(
    messages: list[dict[str, Any]], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    def changed(call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "function": change(call["function"])} if "function" in call else change(call)

    return [
        {**m, "tool_calls": [changed(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every call and result an id of nine letters and digits, as Mistral's templates require.

    The id is made from the given one, or from the call's place. A result without an id belongs to the first
    call before it that has no result yet.
    """
    changed, waiting = [], []
    for place, message in enumerate(messages):
        if "tool_calls" in message:
            calls = [
                {**call, "id": _short_id(call.get("id") or f"{place}.{at}")}
                for at, call in enumerate(message["tool_calls"])
            ]
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            id = _short_id(given) if given else (waiting[:1] or [_short_id(str(place))])[0]
            waiting = [other for other in waiting if other != id]
            message = {**message, "tool_call_id": id}
        changed.append(message)
    return changed


def _short_id(id: Any) -> str:
    text = str(id)
    nine = len(text) == 9 and text.isascii() and text.isalnum()
    return text if nine else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _with_single_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each call its own message, followed by its result; Llama 3.1's templates take only one call."""
    changed: list[dict[str, Any]] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        if len(message.get("tool_calls", ())) < 2:
            changed.append(message)
            continue
        results: list[dict[str, Any]] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for at, call in enumerate(message["tool_calls"]):
            changed.append({**message, **({"content": ""} if at else {}), "tool_calls": [call]})
            ids = [result.get("tool_call_id") for result in results]
            if results:
                changed.append(results.pop(ids.index(call.get("id")) if call.get("id") in ids else 0))
        changed += results
    return changed


REPAIRS = (without_null, _with_mappings, _with_short_ids, _with_single_calls)
