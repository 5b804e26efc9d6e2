"""Bring the messages and tools of a chat into the form that chat templates read.

Clients write the form of OpenAI's API; templates read the form that transformers passes to them. The server,
`LLM.chat` and the calibrator all use this module, so that they render the same chat to the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qrt.compat.fields import MESSAGE_FIELDS
from qrt.compat.settings import refused
from qrt.errors import ConfigError, UnsupportedError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Check the messages and bring calls and contents into one form; ConfigError names what is wrong.

    Arguments of a tool call that are the JSON of a mapping become that mapping. Other text stays text: the
    model may have been cut off. Content parts become `{"type": "text", "text": ...}`. Null and missing
    contents stay, and so do all other keys. An assistant's thinking, reasoning_content or reasoning, is then
    under both names. OpenAI's older form of a call (`function_call`, the role
    function) becomes the newer one. UnsupportedError for a message with pictures or sound.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages: expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ConfigError("messages: expected at least one message, got none")
    return [_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Check the tools and leave out their null entries; return None where there are none."""
    if not tools:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools: expected a list of tools, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ConfigError(
                f"tools.{index}: expected a mapping, got {type(tool).__name__}; write the tool as "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            )
    return [
        {key: _given(value) if isinstance(value, Mapping) else value for key, value in _given(tool).items()}
        for tool in tools
    ]


def join_parts(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join the texts of content parts, one part per line."""
    return "\n".join(part["text"] for part in parts)


def _given(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(
            f'{where}: expected a mapping such as {{"role": "user", "content": "..."}}, '
            f"got {type(message).__name__}"
        )
    read = dict(message)
    if not isinstance(read.get("role"), str):
        raise ConfigError(f"{where}.role: expected text, got {read.get('role')!r:.50}")
    for line in refused(MESSAGE_FIELDS, read, read):
        raise UnsupportedError(f"{where}.{line}")
    if "content" in read:
        read["content"] = _content(read["content"], read["role"], f"{where}.content")
    if thought := _thought(read):
        read |= {"reasoning_content": thought, "reasoning": thought}
    if read["role"] == "function":
        read["role"] = "tool"
    if call := read.pop("function_call", None):
        read["tool_calls"] = [_call({"function": call}, f"{where}.function_call")]
    elif calls := read.pop("tool_calls", None):
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            raise ConfigError(f"{where}.tool_calls: expected a list of calls, got {type(calls).__name__}")
        read["tool_calls"] = [_call(call, f"{where}.tool_calls.{at}") for at, call in enumerate(calls)]
    return read


def _thought(message: Mapping[str, Any]) -> str | None:
    """Return the thinking of an assistant's message, if it has one as a text."""
    names = ("reasoning_content", "reasoning") if message["role"] == "assistant" else ()
    return next((text for name in names if isinstance(text := message.get(name), str) and text), None)


def with_thinking(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give each thinking the name `thinking`, for templates that read it by that.

    gpt-oss's template takes no thinking beside both a content and calls: there it is left out.
    """
    return [
        {"thinking": thought, **message}
        if (thought := _thought(message)) and not (message.get("content") and message.get("tool_calls"))
        else dict(message)
        for message in messages
    ]


def _content(content: Any, role: str, where: str) -> Any:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        if role == "tool" and not isinstance(content.get("text"), str):
            return content  # a function's result, which templates write as JSON
        content = [content]
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise ConfigError(f"{where}: expected text, or parts of text, got {content!r:.50}")
    return [_part(part, f"{where}.{index}") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind is not None else None
    if kind not in (*TEXT_PARTS, "refusal"):
        got = f"{part!r:.50}" if kind is None else f"a part of type {kind!r:.50}"
        raise ConfigError(f"{where}: expected a part of type 'text', got {got}; qrt reads text only")
    if not isinstance(text, str):
        raise ConfigError(f"{where}: expected a part with a text, got {part!r:.50}")
    return {**part, "type": "text", "text": text} if kind == "text" else {"type": "text", "text": text}


def _call(call: Any, where: str) -> dict[str, Any]:
    """Read a call of an earlier turn; name and arguments may also stand in the call itself."""
    if not isinstance(call, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {type(call).__name__}")
    function = call.get("function") or call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where}: expected a function's name and arguments, got {call!r:.80}")
    if function is call:
        return _with_arguments(call)
    return {"type": "function", **call, "function": _with_arguments(function)}


def _with_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    return {**function, "arguments": {} if arguments is None else arguments}


def _parsed(arguments: str) -> Any:
    """Return the mapping that the text is the JSON of, or the text; an empty text gives {}."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False).encode()  # fails for lone surrogates, which no prompt can hold
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
