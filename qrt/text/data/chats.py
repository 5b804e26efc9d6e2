"""Read the conversation of a data row: its messages, with OpenAI's roles, and its tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qrt.errors import ConfigError, UnsupportedError
from qrt.text.messages import read_messages

CHAT_KEYS = ("messages", "conversations", "conversation")
ASKED = ("prompt", "instruction", "question", "query")
CONTEXT = ("input", "context")
ANSWERED = ("completion", "response", "output", "answer", "chosen")
SYSTEM = ("system", "system_prompt", "system_message")
TEXT_KEYS = ("text", "content", "prompt")  # keys of the text in a row without a conversation
ROLES = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
    "tool_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip

Message = dict[str, Any]


class Unused(Exception):
    """Raised for a row that is left out. The message is the reason, in the same words for all such rows."""


def messages_of(row: Mapping[str, Any]) -> list[Message] | None:
    """Return the messages of a row, with its system prompt; None where it holds no conversation.

    A conversation is a list of messages under one of CHAT_KEYS, or a question and its answer: one key of
    ASKED (with CONTEXT and `history`) and one of ANSWERED. The answer to a list that ends with the user's
    message is also found under ANSWERED. Unused where the conversation is incomplete.
    """
    key = _first(row, CHAT_KEYS)
    messages = conversation(row[key]) if key else _pair(row)
    if messages is None:
        return None
    if key and messages[-1]["role"] == "user" and (answered := _first(row, ANSWERED)):
        answer = _answer(row[answered], answered)
        messages = answer if _is_whole(answer) else [*messages, *answer]
    if key := _first(row, SYSTEM):
        system = _text(row[key], key)
        first = (messages[0]["role"], messages[0]["content"])
        if system.strip() and first != ("system", system):
            messages.insert(0, {"role": "system", "content": system})
    return messages


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, Mapping) and not m.keys().isdisjoint(("role", "from")) for m in value)
    )


def is_row(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a row itself: whether it has a text or a conversation."""
    has_text = any(isinstance(value.get(key), str) for key in (*TEXT_KEYS, *ASKED))
    return has_text or any(is_conversation(value.get(key)) for key in (*CHAT_KEYS, *ASKED))


def conversation(entries: Any) -> list[Message]:
    """Return messages in OpenAI's form from OpenAI's or ShareGPT's; Unused where one is incomplete."""
    if not isinstance(entries, list):
        raise Unused(f"a conversation that is {kind_name(entries)}, not a list of messages")
    messages = [message for entry in entries for message in _message(entry)]
    if not any(m["content"] or m.get("tool_calls") for m in messages):
        raise Unused("a conversation without messages")
    try:
        return read_messages(messages)
    except UnsupportedError as error:  # "messages.INDEX.KEY: ..."
        key = str(error).partition(": ")[0].rpartition(".")[2]
        raise Unused(f"a message with {key!r}, which is not text") from None
    except ConfigError as error:  # "messages.INDEX: expected A, got B"; a reason names neither index nor B
        expected = str(error).partition(": ")[2].partition(", got")[0]
        raise Unused(f"a message of another form: {expected}") from None


def tools_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a row in OpenAI's form. They are a list or its JSON, or the older `functions`."""
    tools = row.get("tools") or row.get("functions")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise Unused("tools that are not JSON") from None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise Unused("tools that are not a list of objects")
    return [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool
        for tool in tools or []
    ]


def _pair(row: Mapping[str, Any]) -> list[Message] | None:
    """Return a question and its answer as messages; None where the row lacks one of the two."""
    asked, answered = _first(row, ASKED) or _first(row, CONTEXT[:1]), _first(row, ANSWERED)
    if not asked or not answered:
        alone = row.get(asked or "chosen")
        return conversation(alone) if is_conversation(alone) else None
    answer = _answer(row[answered], answered)
    if _is_whole(answer):
        return answer
    if is_conversation(row[asked]):
        question = conversation(row[asked])
    else:
        context = next((key for key in CONTEXT if key != asked and row.get(key)), None)
        parts = [_filled(row[asked], asked), *([_text(row[context], context)] if context else [])]
        question = [{"role": "user", "content": "\n\n".join(parts)}]
    return [*_history(row.get("history")), *question, *answer]


def _answer(value: Any, name: str) -> list[Message]:
    """Return the messages of an answer, which is a text, a message or a list of messages."""
    entries = [value] if isinstance(value, Mapping) else value
    if is_conversation(entries):
        return conversation(entries)
    return [{"role": "assistant", "content": _filled(value, name)}]


def _is_whole(answer: Sequence[Message]) -> bool:
    """Return whether an answer is a whole conversation, which repeats the question."""
    return any(message["role"] == "user" for message in answer)


def _history(turns: Any) -> list[Message]:
    """Return the messages of earlier pairs of question and answer."""
    if not turns:
        return []
    if not isinstance(turns, list) or any(not isinstance(turn, Sequence) or len(turn) != 2 for turn in turns):
        raise Unused("a history that is not a list of questions and answers")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": _text(text, "history")}
        for turn in turns
        for role, text in zip(roles, turn, strict=True)
    ]


def _message(entry: Any) -> list[Message]:
    """Return the message of an entry, or those of a question and answer with maybe a system."""
    if not isinstance(entry, Mapping):
        raise Unused(f"a message that is {kind_name(entry)}, not an object")
    if entry.keys() >= {"input", "output"} and entry.keys().isdisjoint(("role", "from")):
        said = [("user", entry["input"]), ("assistant", entry["output"])]
        if entry.get("system"):
            said.insert(0, ("system", entry["system"]))
        return [{"role": role, "content": _text(text, "a message")} for role, text in said]
    message = {key: value for key, value in entry.items() if value is not None}
    if "role" not in message:
        message = {"role": message.get("from"), "content": message.get("value")}
    role = message.get("role")
    if not isinstance(role, str):
        raise Unused("a message without a role")
    if (known := ROLES.get(role.strip().lower())) is None:
        raise Unused(f"a message of the unknown role {role!r:.40}")
    if known == "call":
        return [{"role": "assistant", "content": "", "tool_calls": _calls(message.get("content"))}]
    if call := message.pop("function_call", None):  # OpenAI's form before tools
        message["tool_calls"] = _calls(call)
    if message.get("content") is None and not message.get("tool_calls"):
        raise Unused("a message without content")
    return [{"content": "", **message, "role": known}]


def _calls(value: Any) -> list[dict[str, Any]]:
    """Read tool calls from JSON: one {"name", "arguments"}, or a list of them."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise Unused("a function call that is not JSON") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(c, Mapping) and isinstance(c.get("name"), str) for c in calls):
        raise Unused("a function call without a name")
    named = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    return [{"type": "function", "function": function} for function in named]


def _first(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if row.get(key) is not None), None)


def _filled(value: Any, name: str) -> str:
    text = _text(value, name)
    if not text.strip():
        raise Unused(f"an empty {name!r}")
    return text


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Unused(f"a {name!r} that is {kind_name(value)}, not text")
    return value


def kind_name(value: Any) -> str:
    """Return the name of a value's JSON type, for messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
