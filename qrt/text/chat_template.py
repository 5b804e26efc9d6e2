"""ChatTemplate: turn a conversation into a prompt, by the checkpoint's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from qrt.errors import ConfigError, UnsupportedError
from qrt.text.messages import Message, join_parts, read_messages, read_tools, with_thinking
from qrt.text.repairs import repaired, without_null
from qrt.text.sandbox import compile_template, limited_range, within

MAX_TEMPLATE_CHARS = 64 * 2**10
RENDER_SECONDS = 5.0  # longest time to render a conversation
END_OF_TURN = "\x00end of the final message\x00 "  # ends with a space, to see whether the template trims
PROBE = "a text that no template has"
ASKED = {"role": "user", "content": "x"}
CALLED = {"type": "function", "id": "123456789", "function": {"name": "f", "arguments": {}}}
# The messages before and after the one of each role that is tried out.
BEFORE: dict[str, tuple[dict[str, Any], ...]] = {
    "assistant": (ASKED,),
    "tool": (ASKED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}),
}
AFTER = {"system": (ASKED,), "developer": (ASKED,)}


class ChatTemplate:
    """Renders conversations with one template.

    special_tokens   the tokenizer's special tokens by name, which the template may use: {"bos_token": "<s>"}
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template; ConfigError where it is too long or not valid Jinja."""
        if len(text) > MAX_TEMPLATE_CHARS:
            raise ConfigError(
                f"chat template: expected at most {MAX_TEMPLATE_CHARS} characters, got {len(text)}"
            )
        self._text = text
        self._special_tokens = dict(special_tokens)
        try:
            compile_template(text)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: not valid Jinja: {error}") from error

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
        """Render the messages to a prompt.

        With `continue_final_message` the prompt ends inside the last message, and the model continues it.
        `named` holds the template's own arguments.

        The result equals that of transformers for the messages that `read_messages` returns, with three
        changes. Parts of text are joined where the template reads no parts. A text becomes a part where the
        template reads only parts. The role developer becomes system where the template does not show it.
        If the template still refuses the messages, repairs that change as little as helps are applied
        (`repairs.py`).
        ConfigError when it refuses even then, or exceeds the sandbox's limits; UnsupportedError for tools or
        documents that the template never shows.
        """
        for name, items in (("tools", tools), ("documents", documents)):
            if items and name not in self._text:
                raise UnsupportedError(
                    f"{name}: expected none, as the chat template shows the model none, got {len(items)}; "
                    "leave them out, or give a template that shows them"
                )
        if continue_final_message and add_generation_prompt:
            raise ConfigError(
                "continue_final_message: expected without add_generation_prompt, got both; leave one out"
            )
        read = read_messages(messages)
        if not self._knows_developers:
            read = [{**m, "role": "system"} if m["role"] == "developer" else m for m in read]
        if ".thinking" in self._text and "reasoning_content" not in self._text:
            read = with_thinking(read)
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
        """Render the messages unchanged, or with the fewest repairs that the template accepts."""
        refused: Exception | None = None
        for version in repaired(read):
            messages = [{**m, **self._content(m)} for m in version]
            try:
                text = self._rendered(_marked(messages) if marked else messages, given)
            except ConfigError:
                raise
            except Exception as error:
                refused = refused or error  # what the template says of the messages as they came
                continue
            return text if refused else self._without_none(text, read, given, marked)
        assert refused is not None
        raise refused

    def _without_none(
        self, text: str, read: list[dict[str, Any]], given: dict[str, Any], marked: bool
    ) -> str:
        """Return `text`, or a rendering that does not print "None" for a content that is null."""
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

    @property
    def _knows_developers(self) -> bool:
        """Whether the template names the role and shows it: the word may also stand in its prose."""
        return "developer" in self._text and self._shows("developer", parts=False)

    def _content(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the content as the template reads it, text or parts; {} where it needs no change."""
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
    """Return whether the template shows a text of the role; a short chat is rendered to find out.

    parts   give the text as a content part, not as a string
    """

    def tried(content: Any) -> str:
        message = {"role": role, "content": content, "tool_call_id": CALLED["id"]}
        chat = [*BEFORE.get(role, ()), message, *AFTER.get(role, ())]
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
    # a template that prints the list itself prints its key "type" too
    return PROBE in shown and shown.count("type") <= tried(PROBE).count("type")


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a mark at the end of the last one."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str) and content:
        return [*before, {**last, "content": content + END_OF_TURN}]
    if isinstance(content, list) and content:
        *parts, end = content
        return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + END_OF_TURN}]}]
    raise ConfigError("continue_final_message: the final message has no text to continue")


def _cut(text: str) -> str:
    """Return the text before the mark; where the template trims, without spaces at its end."""
    mark = END_OF_TURN.strip()
    if mark not in text:
        raise ConfigError("continue_final_message: the template does not show the final message as it is")
    end = text.rindex(mark)
    return text[:end] if text[end:].startswith(END_OF_TURN) else text[:end].rstrip()
