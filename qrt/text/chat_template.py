"""ChatTemplate: a conversation to a prompt, by Jinja in a sandbox with bounds.

A checkpoint brings its template, so a template is as trusted as a checkpoint: not at all. It sees nothing but
its arguments and cannot change them. What it may loop over and ask for at once is bounded, and it has
RENDER_SECONDS. That bounds neither memory nor a single operation: a text doubled thirty times by `~` takes
gigabytes within them, and comparing two lists so doubled holds Python's lock, and with it the server, as long
as it takes. Nothing in a sandbox can end that; a template that wants to stop its own server can.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from qrt.errors import ConfigError, UnsupportedError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}

MAX_TEMPLATE_CHARS = 64 * 2**10
MAX_ITERATIONS = 1_000_000  # of all ranges of a rendering together
MAX_REPEATED = 1_000_000  # characters or items that an operator or an integer argument may ask for
RENDER_SECONDS = 5.0
END_OF_TURN = "\x00end of the final message\x00"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses what makes much of little in one step, beside what jinja's sandbox refuses."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Numbers as ever; a text or list times a number up to MAX_REPEATED."""
        if operator == "**" and abs(right) > 64:
            raise SecurityError(f"** {right}")
        for sized, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(sized, Sequence) and isinstance(times, int):
                if len(sized) * times > MAX_REPEATED:
                    raise SecurityError(f"a sequence of {len(sized) * times} items")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        """No function is given a large number."""
        _check_numbers(*args, *named.values())
        return super().call(context, function, *args, **named)

    def wrap_str_format(self, value: Any) -> Any:
        """Of a text's own `format`, too."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(value.__self__)
        return wrapped


def _check_numbers(*arguments: Any) -> None:
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_REPEATED:
            raise SecurityError(f"an argument of {argument}")


def _check_widths(format: str) -> None:
    if re.search(r"\d{6}|[{*]\s*[:}].*\{", format):
        raise SecurityError("a format with a large or computed width")


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """See jinja2.ext.Extension."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _sized(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses large numbers."""

    @wraps(filter)  # with the attribute in which jinja reads what to pass
    def checked(*args: Any, **named: Any) -> Any:
        _check_numbers(*args, *named.values())
        return filter(*args, **named)

    return checked


@lru_cache(maxsize=16)
def _compile(text: str) -> jinja2.Template:
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    for name in ("center", "indent", "wordwrap", "truncate", "batch", "slice", "round"):
        sandbox.filters[name] = _sized(sandbox.filters[name])
    del sandbox.filters["format"], sandbox.globals["lipsum"]
    sandbox.filters["tojson"] = _tojson
    sandbox.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return sandbox.from_string(text)


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
        self._special_tokens = special_tokens
        try:
            _compile(text)
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
        """The prompt. With `continue_final_message` it ends inside the last message, which the model goes on
        with. `named` are the template's own. A content of text parts is joined, None is empty; OpenAI's role
        developer is the system's where the template knows none. ConfigError when the template refuses, or
        does too much; UnsupportedError for tools or documents it never shows.
        """
        for name, items in (("tools", tools), ("documents", documents)):
            if items and name not in self._text:
                raise UnsupportedError(
                    f"{name}: got {len(items)}, but the chat template shows the model none; leave them out, "
                    "or give a template that does"
                )
        messages = [{**message, "content": _text_of(message.get("content"))} for message in messages]
        if "developer" not in self._text:
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        if continue_final_message and add_generation_prompt:
            raise ConfigError("continue_final_message: wanted without add_generation_prompt")
        given = {
            **self._special_tokens,
            **named,
            "messages": _marked(messages) if continue_final_message else messages,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
            "range": _limited_range(),
        }
        try:
            text = _within(RENDER_SECONDS, lambda: _compile(self._text).render(**given))
        except ConfigError:
            raise
        except Exception as error:  # a template can raise anything: it calls methods of its arguments
            raise ConfigError(f"chat: the template refuses these messages: {error}") from error
        if not continue_final_message:
            return text
        if END_OF_TURN.strip() not in text:
            raise ConfigError("continue_final_message: the template does not show the final message as it is")
        return text[: text.rindex(END_OF_TURN)]


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if wrong := [part for part, text in zip(parts, texts, strict=True) if not isinstance(text, str)]:
        raise ConfigError(f"messages: got {str(wrong[0])[:50]} in a content, wanted text, or parts of text")
    return "\n".join(map(str, texts))


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages, with a mark where the last one ends."""
    *before, last = messages
    content = last.get("content")
    if not isinstance(content, str) or not content:
        raise ConfigError("continue_final_message: the final message has no text to go on with")
    return [*before, {**last, "content": content + END_OF_TURN}]


def _limited_range() -> Callable[..., Iterator[int] | range]:
    left = MAX_ITERATIONS

    def limited(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        left -= len(numbers)
        if left < 0:
            raise SecurityError(f"more than {MAX_ITERATIONS} iterations")
        return numbers

    return limited


def _within(seconds: float, render: Callable[[], str]) -> str:
    """The result of `render`, or ConfigError after `seconds`, with nothing left running: the exception is
    raised in the thread that renders, between two of its steps."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(render())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name="chat template", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(TimeoutError)
        )
        thread.join(seconds)
        raise ConfigError(f"chat: the template has not ended after {seconds:g} s")
    if isinstance(result[0], BaseException):
        raise result[0]
    return str(result[0])
