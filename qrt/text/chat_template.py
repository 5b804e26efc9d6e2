"""ChatTemplate: a conversation to a prompt, by the checkpoint's own template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

import jinja2

from qrt.errors import ConfigError, UnsupportedError
from qrt.text.messages import Message, join_parts, read_messages, read_tools
from qrt.text.repairs import REPAIRS, without_null
from qrt.text.sandbox import compile_template, limited_range, within

MAX_TEMPLATE_CHARS = 64 * 2**10
RENDER_SECONDS = 5.0  # for all that a conversation takes
END_OF_TURN = "\x00end of the final message\x00 "  # with a space, which shows whether the template trims
PROBE = "a text that no template has"
ASKED = {"role": "user", "content": "x"}
CALLED = {"type": "function", "id": "123456789", "function": {"name": "f", "arguments": {}}}
# What stands before and behind a message of each role when it is tried out.
BEFORE: dict[str, tuple[dict[str, Any], ...]] = {
    "assistant": (ASKED,),
    "tool": (ASKED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}),
}
BEHIND = {"system": (ASKED,)}


class ChatTemplate:
    """One template, and what of the tokenizer it may name.

    special_tokens   e.g. {"bos_token": "<s>"}
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        """ConfigError for a template that is too large or no Jinja."""
        if len(text) > MAX_TEMPLATE_CHARS:
            raise ConfigError(
                f"chat template: got {len(text)} characters, wanted at most {MAX_TEMPLATE_CHARS}"
            )
        self._text = text
        self._special_tokens = dict(special_tokens)
        try:
            compile_template(text)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: no valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **named: Any,
    ) -> str:
        """Render the prompt. With `continue_final_message` it ends inside the last message, which the model
        goes on with. `named` are the template's own.

        The result is that of transformers, after `read_messages`. Parts of text are joined where the template
        does not read parts, text becomes a part where it reads nothing else, and OpenAI's role developer is
        the system's where the template does not know it. What transformers would fail on is changed as
        little as helps: see `repairs.py`. ConfigError when the template refuses even then, or does too
        much; UnsupportedError for tools or documents it never shows.
        """
        for name, items in (("tools", tools), ("documents", documents)):
            if items and name not in self._text:
                raise UnsupportedError(
                    f"{name}: got {len(items)}, but the chat template shows the model none; leave them out, "
                    "or give a template that does"
                )
        if continue_final_message and add_generation_prompt:
            raise ConfigError("continue_final_message: wanted without add_generation_prompt")
        read = read_messages(messages)
        if "developer" not in self._text:
            read = [{**m, "role": "system"} if m["role"] == "developer" else m for m in read]
        given = {
            **named,
            "tools": read_tools(tools),
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = within(RENDER_SECONDS, lambda: self._repaired(read, given, continue_final_message))
        except ConfigError:
            raise
        except Exception as error:  # a template can raise anything: it calls methods of its arguments
            raise ConfigError(f"chat: the template refuses these messages: {error}") from error
        return _cut(text) if continue_final_message else text

    def _repaired(self, read: list[dict[str, Any]], given: dict[str, Any], marked: bool) -> str:
        """Render the messages as they are, or with the fewest repairs that the template takes."""
        for needed in _subsets(read):
            messages = read
            for repair in needed:
                messages = repair(messages)
            messages = [{**m, **self._content(m)} for m in messages]
            try:
                text = self._rendered(_marked(messages) if marked else messages, given)
            except ConfigError:
                raise
            except Exception as error:
                refused = error
                continue
            return text if needed else self._without_none(text, read, given, marked)
        raise refused

    def _without_none(
        self, text: str, read: list[dict[str, Any]], given: dict[str, Any], marked: bool
    ) -> str:
        """`text`, or without what it prints of a content that is null."""
        if "None" not in text or all(m.get("content", "") is not None for m in read):
            return text
        filled = without_null(read)
        try:
            other = self._repaired(filled, given, marked)
        except Exception:
            return text
        return other if other.count("None") < text.count("None") else text

    def _rendered(self, messages: Sequence[Message], given: Mapping[str, Any]) -> str:
        return compile_template(self._text).render(
            {**self._special_tokens, **given, "messages": messages, "range": limited_range()}
        )

    def _content(self, message: dict[str, Any]) -> dict[str, Any]:
        """The content as the template reads it: text, or parts."""
        content, role = message.get("content"), message["role"]
        if isinstance(content, list):
            return {} if self._shows(role, parts=True) else {"content": join_parts(content)}
        if isinstance(content, str) and content and self._wants_parts(role):
            return {"content": [{"type": "text", "text": content}]}
        return {}

    def _wants_parts(self, role: str) -> bool:
        return "text" in self._text and not self._shows(role, parts=False) and self._shows(role, parts=True)

    def _shows(self, role: str, parts: bool) -> bool:
        return _shows(self._text, tuple(self._special_tokens.items()), role, parts)


@lru_cache(maxsize=256)
def _shows(template: str, special_tokens: tuple[tuple[str, str], ...], role: str, parts: bool) -> bool:
    """Whether the template shows a text of the role, given as it is or as a part, tried on a short chat."""

    def tried(content: Any) -> str:
        message = {"role": role, "content": content, "tool_call_id": CALLED["id"]}
        chat = [*BEFORE.get(role, ()), message, *BEHIND.get(role, ())]
        try:
            return compile_template(template).render(
                {**dict(special_tokens), "messages": chat, "tools": None, "range": limited_range()}
            )
        except Exception:
            return ""

    if not parts:
        return PROBE in tried(PROBE)
    if "text" not in template:
        return False
    shown = tried([{"type": "text", "text": PROBE}])
    return PROBE in shown and shown.count("type") <= tried(PROBE).count("type")  # not as a list is printed


def _subsets(messages: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """The repairs that change something: none of them, each, two at a time, all."""
    changing = [repair for repair in REPAIRS if repair(messages) != messages]
    for count in range(len(changing) + 1):
        yield from combinations(changing, count)


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages, with a mark where the last one ends."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str) and content:
        return [*before, {**last, "content": content + END_OF_TURN}]
    if isinstance(content, list) and content:
        *parts, end = content
        return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + END_OF_TURN}]}]
    raise ConfigError("continue_final_message: the final message has no text to go on with")


def _cut(text: str) -> str:
    """The text before the mark; as in transformers without its last spaces where the template trims."""
    mark = END_OF_TURN.strip()
    if mark not in text:
        raise ConfigError("continue_final_message: the template does not show the final message as it is")
    end = text.rindex(mark)
    return text[:end] if text[end:].startswith(END_OF_TURN) else text[:end].rstrip()
