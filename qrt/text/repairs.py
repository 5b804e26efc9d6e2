"""Repairs: each brings messages that a chat template refuses into a form that more templates accept.

Those of `FORMS` change how a message is written, those of `ROLES` who says it. `SYSTEMS_GONE` takes the
system's first message away, which some models were trained without, and `CALLS_GONE` all calls.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from qrt.text.messages import join_parts

SYSTEMS = ("system", "developer")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
BETWEEN_TURNS = "\n\n"
Messages = list[dict[str, Any]]
Repair = Callable[[Messages], Messages]


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


def _without_calls(messages: Messages) -> Messages:
    """Write calls and their results as texts of the assistant and the user."""
    changed = []
    for message in messages:
        if message["role"] == "tool":
            message = {"role": "user", "content": _text(message.get("content"))}
        elif "tool_calls" in message:
            calls = [call.get("function", call) for call in message["tool_calls"]]
            texts = [{key: call.get(key) for key in ("name", "arguments")} for call in calls]
            own = [text] if (text := _text(message.get("content"))) else []
            content = "\n".join([*own, *(json.dumps(text, ensure_ascii=False) for text in texts)])
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = content
        changed.append(message)
    return changed


def _with_later_systems_as_users(messages: Messages) -> Messages:
    """Let the user say what the system says behind the first other message."""
    first = len(list(takewhile(_is_system, messages)))
    return messages[:first] + _as_users(messages[first:])


def _with_first_systems_as_users(messages: Messages) -> Messages:
    """Let the user say what the system says before all others."""
    first = len(list(takewhile(_is_system, messages)))
    return _as_users(messages[:first]) + messages[first:]


def _as_users(messages: Messages) -> Messages:
    return [{**message, "role": "user"} if _is_system(message) else message for message in messages]


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in SYSTEMS


def _with_empty_turns(messages: Messages) -> Messages:
    """Put an empty turn of the user before a first assistant, and one of the assistant behind calls."""
    changed: Messages = []
    for message in messages:
        last = changed[-1] if changed else {"role": "system"}
        if message["role"] == "assistant" and _is_system(last):
            changed.append({"role": "user", "content": ""})
        elif message["role"] == "user" and (last["role"] == "tool" or "tool_calls" in last):
            changed.append({"role": "assistant", "content": ""})
        changed.append(message)
    return changed


def _with_joined_turns(messages: Messages) -> Messages:
    """Join neighbours of one role; results of tools stay apart."""
    changed: Messages = []
    for message in messages:
        last: dict[str, Any] = changed[-1] if changed else {"role": None}
        if message["role"] == "tool" or message["role"] != last["role"]:
            changed.append(message)
            continue
        joined = {**last, **message, "content": _joined(last, message, "content")}
        for name in THOUGHTS:
            if name in joined:
                joined[name] = _joined(last, message, name)
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            joined["tool_calls"] = calls
        changed[-1] = joined
    return changed


def _joined(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> str:
    return BETWEEN_TURNS.join(text for each in (one, other) if (text := _text(each.get(name))))


def _text(content: Any) -> str:
    """Return a content as one text; a function's result may be a mapping."""
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False) if isinstance(content, Mapping) else join_parts(content)


FORMS: tuple[Repair, ...] = (without_null, _with_mappings, _with_short_ids, _with_single_calls)
ROLES: tuple[Repair, ...] = (
    _with_later_systems_as_users, _with_empty_turns, _with_joined_turns,
)  # fmt: skip
SYSTEMS_GONE: tuple[Repair, ...] = (_with_first_systems_as_users,)
CALLS_GONE: tuple[Repair, ...] = (_without_calls,)
KINDS = (CALLS_GONE, SYSTEMS_GONE, ROLES, FORMS)


def repaired(messages: Messages, kinds: Sequence[Sequence[Repair]] = KINDS) -> Iterator[Messages]:
    """Yield the messages as they are, and then with ever more repairs.

    What changes less comes first: any repairs of a later kind before one of an earlier kind, and of one kind
    the fewest. A repair that changes nothing is left out.
    """
    if not kinds:
        yield messages
        return
    first, *others = kinds
    made = [(0, messages)]
    while made:
        for _, version in made:
            yield from repaired(version, others)
        made = [
            (place, changed)
            for start, version in made
            for place, repair in enumerate(first[start:], start + 1)
            if (changed := repair(version)) != version
        ]
